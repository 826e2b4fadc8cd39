"""Fused GPU code for all that is not a table: the layers of DLRM and DCN, and optimizer steps on dense gradients.

``layers`` and ``interactions`` are the kernels of the networks. ``step`` is a training step that uses them, and
``limits`` says which networks have one. ``foreach`` updates several parameters in one launch for ``quorem.optim``;
``rules`` says which optimizers of ``torch.optim`` have a fused version.
"""
