"""Networks without a server: nodes that exchange with their neighbours, over encrypted links."""
