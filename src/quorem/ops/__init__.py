"""The composed lookup of single ids and bags, its gradients, and updates of rows: one truth, fused for each device.

    layout       any mix of schemes as integers; a ``Layout`` is what an op needs to find an id's rows
    state        the state and the constants of each optimizer's rule
    declare      every op's schema, shapes and kernels by device
    autograd     lookup with gradients: dense, sparse, or in backward
    updates      a step on the rows that were read; rows that lag behind
    in_backward  collects the gradients of a backward pass for an optimizer

The truth, in plain PyTorch; ``cpu`` (Numba) and ``gpu`` (Triton) have the same in files of the same names:

    rows         an ``IdBatch``, and which rows an id reads
    lookup       composed vectors; those of a bag are pooled
    gradients    gradients of rows, summed by row
    rules        the optimizers' rules on touched rows
    replay       what rows missed under Adam and AMSGrad
"""
