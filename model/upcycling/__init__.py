"""Sparse upcycling: a dense model as a Mixture of Experts (Komatsuzaki et al., ICLR 2023).

Every MLP becomes a layer of experts that begin as copies of it, behind a router that begins at
random. Training would tell the copies apart; here each gets noise of its own instead, so that it
matters which ones a token goes to, and what that costs is measured. It makes a small MoE model that
answers out of any small llama.
"""
