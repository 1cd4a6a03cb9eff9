"""Networks without a server: links, weights, failures, and how soon such a network agrees.

A graph is a pure function of its settings and (nodes, seed, round, gossip step), so that every process draws the same
one and none is ever stored. In three steps it becomes the matrix with which a round is mixed::

    edges = topology.edges(nodes, at)                 [E, 2]  pairs, or sender and receiver where it is directed
    weights = topology.weigh(nodes, at, sizes)        w_il: how much node i makes of what node l sent
    weights = surviving(topology, weights, at, ok)    after what failed in this round has given its weight back

Rows of weights sum to one, so that nodes which agree stay as they are; where columns do, too, mixing preserves the
mean, and psi = ||W - J||_2 < 1 says how fast the nodes agree: ||W X - J X|| <= psi ||X - J X||, with J the matrix that
averages. Under push-sum only the columns do, and each node divides by the mass that it received.
"""
