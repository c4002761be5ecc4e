"""How the weights of linear layers lie in memory, and the products by them. Only `shoal.models` imports from here."""
