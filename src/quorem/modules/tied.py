"""A linear layer whose weight is the table of an embedding."""

from torch import Tensor, nn

from .embedding import Embedding


class TiedLinear(nn.Module):
    """``nn.Linear`` whose weight is ``embedding.weight``, composed a block of ids at a time.

    The embedding is not registered as a child, since it is a module of the model already: its rows are saved, moved
    and trained once.

    Args:
        embedding: the embedding whose table is the weight.
        bias: a parameter ``[n]``, or None.

    >>> import torch
    >>> from quorem import QR
    >>> embedding = Embedding(1000, 16, QR(num_collisions=4))
    >>> head = TiedLinear(embedding)
    >>> head(torch.ones(2, 16)).shape, len(list(head.parameters()))
    (torch.Size([2, 1000]), 0)
    """

    def __init__(self, embedding: Embedding, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.embedding: Embedding
        object.__setattr__(self, "embedding", embedding)  # not registered as a child
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:
        """The table of the embedding, composed when read."""
        return self.embedding.weight

    def forward(self, input: Tensor) -> Tensor:
        """The scores of all ids, ``[..., n]``."""
        scores = self.embedding.score(input)
        return scores if self.bias is None else scores + self.bias

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"
