"""The functions of Meta's llama/model.py, by name and meaning, on the operator.

Source: https://github.com/meta-llama/llama/blob/main/llama/model.py
"""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from rope_ext._C import apply as _apply


def reshape_for_broadcast(freqs_cis: Tensor, x: Tensor) -> Tensor:
    """View a table of shape (seqlen, head_dim/2) as (1, seqlen, 1, head_dim/2), to broadcast against x.

    Args:
        freqs_cis: complex, (seqlen, head_dim/2).
        x: complex, (batch, seqlen, ..., head_dim/2): xq or xk after `torch.view_as_complex`.

    Raises:
        ValueError: the table does not have a row for each token and a column for each pair of x.
    """
    if x.ndim < 2 or tuple(freqs_cis.shape) != (x.shape[1], x.shape[-1]):
        raise ValueError(
            f"reshape_for_broadcast: freqs_cis must have shape (x.shape[1], x.shape[-1]), found freqs_cis "
            f"{tuple(freqs_cis.shape)} for x {tuple(x.shape)}: slice freqs_cis[start_pos : start_pos + seqlen]"
        )
    return freqs_cis.view(*(n if d in (1, x.ndim - 1) else 1 for d, n in enumerate(x.shape)))


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: `torch.ops.rope.apply(xq, xk, freqs_cis)`.

    The bits of Meta's own function where ATen runs that one vectorised (head_dim 64, 80, 96, 128 ...). A float64 x or a
    complex128 table is rotated in float64, which Meta's function would round to float32.

    Args:
        xq: (batch, seqlen, heads, head_dim), float16, bfloat16, float32 or float64, any strides.
        xk: the same but for its number of heads; its dtype may differ.
        freqs_cis: (seqlen, head_dim/2), complex64 or complex128: the rows of the tokens' positions.

    Returns:
        New tensors with the shapes and dtypes of xq and xk.

    Raises:
        TypeError: a dtype not named above; a table that lost its imaginary part to `module.to(dtype)`.
        ValueError: shapes that do not fit, such as a table of more or fewer rows than tokens.
        RuntimeError: tensors on different devices.
    """
    # torch.compile traces the operator; everybody else saves the 1 us that torch.ops takes to parse a call
    if is_dynamo_compiling():
        return torch.ops.rope.apply.default(xq, xk, freqs_cis)  # type: ignore[no-any-return]
    return _apply(xq, xk, freqs_cis)
