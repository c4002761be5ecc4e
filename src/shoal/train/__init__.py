"""The bundled target and drafter: their corpus, training and report."""
