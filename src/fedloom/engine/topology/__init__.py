"""Networks without a server: links, weights, failures, and how fast such a network reaches consensus.

A graph is a pure function of its settings and (nodes, seed, round, gossip step), so that every process draws the same
one and none is ever stored. In three steps it becomes the mixing matrix of a round::

    edges = topology.edges(nodes, at)                 [E, 2]  pairs, or sender and receiver if it is directed
    weights = topology.weigh(nodes, at, sizes)        w_il: the weight of node l's message at node i
    weights = surviving(topology, weights, at, ok)    after the weights of failed links were given back

Rows of weights sum to one, so that nodes that agree do not change; if columns do, too, mixing preserves the mean, and
psi = ||W - J||_2 < 1 is the rate of consensus: ||W X - J X|| <= psi ||X - J X||, with J the averaging matrix. Under
push-sum only the columns do, and each node divides by the mass that it received.
"""
