"""The composed lookup of single ids and bags, its gradients, and updates of rows.

Each op is written once in plain PyTorch, the truth, and again in ``cpu`` (Numba) and ``gpu`` (Triton) in files of the
same names. ``docs/design.md`` says what each file has, and follows one batch through them; start with ``layout``.
"""
