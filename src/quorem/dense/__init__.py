"""What a GPU trains beside the tables: the layers of DLRM and DCN in few launches, and steps on dense gradients.

``layers`` and ``interactions`` are the kernels of the networks, ``step`` a training step made of them, ``limits`` which
networks have one. ``foreach`` steps several parameters in one launch for ``quorem.optim``; ``rules`` says which
optimizers of ``torch.optim`` have a fused version.
"""
