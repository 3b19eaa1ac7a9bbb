"""What every tunnel checks about tokens before it answers, so that a wrong shape never becomes a wrong posterior.

Shapes: n episodes, L positions.
"""

from torch import Tensor

from ..errors import MalformedTokens


def check_symbols(tokens: Tensor, count: int, what: str = "symbols") -> None:
    """Raise `MalformedTokens` unless `tokens` is (n, L) of integers in 0…count−1, naming the first row that is not."""
    check_shape(tokens)
    outside = ((tokens < 0) | (tokens >= count)).any(1)
    if bool(outside.any()):
        raise MalformedTokens(f"row {int(outside.nonzero()[0])}: {what} are 0…{count - 1}")


def check_shape(tokens: Tensor) -> None:
    """Raise `MalformedTokens` unless `tokens` is (n, L) of integers."""
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.is_complex():
        raise MalformedTokens(
            f"tokens must be integers of shape (episodes, positions), not {tokens.dtype} {tuple(tokens.shape)}"
        )
