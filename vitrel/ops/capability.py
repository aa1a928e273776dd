"""The capability table: which calls each backend serves, and from how many tokens "auto" takes it.

A row is data. Its refusals are pairs (words, reason): a call that has all of the words is refused, for that reason; the first
that fits counts. A word is a key of WORDS, and "not" before one negates it. `vitrel.ops.dispatch` chooses by this table, and
`vitrel.ops.why` explains by it.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from vitrel.geometry import is_exporting, is_known, is_traced
from vitrel.ops.backends import augmented_qk
from vitrel.ops.reference import Call, has_content_terms, in_forward_mode
from vitrel.ops.sdpa import computed_in

NEVER = -1
_TRITON = importlib.util.find_spec("triton") is not None  # torch 2.11 cannot compile a call of find_spec
_CONTENT = ("query", "key", "value", "gated")


def _is_compiled(call: Call) -> bool:
    return call.compiled or torch.compiler.is_compiling()


def _triton_limits(call: Call) -> str:
    if call.window is not None:
        from vitrel.ops.backends.triton_window import window_limits  # imports Triton

        return window_limits(call.dtype, call.width, call.window)
    from vitrel.ops.backends.triton_global import global_limits

    return global_limits(call.dtype, call.width, call.grid, call.queries, WORDS["query"](call))


def _has_table(part: str) -> Callable[[Call], bool]:
    return lambda call: any([getattr(table, part) is not None for table in call.terms.tables])


def _has_axis(*axes: str) -> Callable[[Call], bool]:
    return lambda call: any([table.axis in axes for table in call.terms.tables])


WORDS: dict[str, Callable[[Call], bool]] = {
    # what is computed
    "windows": lambda call: call.entry == "window_attention",
    "mask": lambda call: call.mask is not None,
    "dropout": lambda call: bool(call.dropout_p),
    "last-queries": lambda call: call.queries != call.grid.tokens,
    "no-images": lambda call: is_known(call.batch) and call.batch == 0,
    # position terms
    "tables": lambda call: bool(call.terms.tables),
    **{part: _has_table(part) for part in ("bias", *_CONTENT)},
    "content": lambda call: has_content_terms(call.terms.tables),
    "table-hw": _has_axis("hw"),
    "query-of-two-axes": lambda call: any([t.query is not None and t.axis not in ("h", "w") for t in call.terms.tables]),
    "several-biases": lambda call: len([t for t in call.terms.tables if t.bias is not None]) > 1,
    "learned-bias": lambda call: any([t.bias is not None and t.bias.requires_grad for t in call.terms.tables]),
    "scaled-keys": lambda call: call.terms.key_rotary is not None,
    "many-columns": lambda call: 10 * call.batch * augmented_qk.columns(call.terms, call.grid) > call.grid.tokens,
    # dtype and device
    "float64": lambda call: call.dtype == torch.float64,
    "half": lambda call: computed_in(call) in (torch.float16, torch.bfloat16),
    "cpu": lambda call: call.device.type == "cpu",
    "cuda": lambda call: call.device.type == "cuda",
    "triton-installed": lambda call: _TRITON,
    "interpreter": lambda call: os.environ.get("TRITON_INTERPRET") == "1",
    # mode
    "gradients": lambda call: call.grad,
    "deterministic": lambda call: torch.are_deterministic_algorithms_enabled(),
    "compiled": _is_compiled,
    "graph": lambda call: _is_compiled(call) or torch.jit.is_tracing(),
    "recorded": lambda call: _is_compiled(call) or is_traced(call.device),
    "exported": lambda call: is_exporting(),
    "transformed": lambda call: (
        in_forward_mode() or (not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active())
    ),
}


class Row(NamedTuple):
    """What a backend serves. Reasons may contain {device}."""

    unsupported: tuple[tuple[str, str], ...] = ()  # (words, reason) of the calls that it does not serve
    limits: Callable[[Call], str] | None = None  # why the sizes of a call are out of the backend's range, "" if they are not
    # (words, number of tokens from which "auto" takes the backend): the first whose words a call has counts; none: never
    preferred: tuple[tuple[str, int], ...] = ()


_SCALED_KEYS = (
    "scaled-keys",
    "keys scaled by the inverse of the queries (Terms.key_rotary) overflow half precision on large grids",
)
_HALF_SCALED_KEYS = ("scaled-keys half", _SCALED_KEYS[1])
_BIASES_ONLY = "it serves bias tables only, no query, key, value or gated tables"
_KERNEL_TABLES = "its kernels serve bias and query tables only, no key, value or gated tables"
_ONE_AXIS = "its kernels serve query tables of one axis only, and only in global attention"

TABLE: dict[str, Row] = {  # in the order in which "auto" tries them
    # Not taken by "auto" until a GPU has been measured (python -m tools.benchmark --suite ops).
    "triton": Row(
        unsupported=(
            ("not triton-installed", "Triton is not installed"),
            (
                "not cuda not interpreter",
                "its kernels run on a GPU, not on {device} (except in Triton's interpreter, TRITON_INTERPRET=1)",
            ),
            ("exported", "an exported program may contain PyTorch's operators only, so that it runs wherever it is loaded"),
            # forward mode would give derivatives of zero
            ("transformed", "its kernels support first derivatives by backward() only, no transforms of torch.func"),
            ("mask", "its kernels have no mask"),
            ("dropout", "its kernels have no dropout of attention weights; use attn_drop_rate=0"),
            _SCALED_KEYS,
            ("key", _KERNEL_TABLES),
            ("value", _KERNEL_TABLES),
            ("gated", _KERNEL_TABLES),
            ("query windows", _ONE_AXIS),
            ("query-of-two-axes", _ONE_AXIS),
        ),
        limits=_triton_limits,
    ),
    # Speed relative to sdpa on one thread of an EPYC (results/benchmark/amd-epyc/ops): forward 0.98 at 14x14, 1.21 at 28x28,
    # 2.6 at 64x64; in training 0.97 at 28x28 with one table and 1.05 with two, 1.68 at 64x64. With biases that need no gradient
    # SDPA also has a flash kernel for the backward pass, which is faster until masks are large. It always needs less memory.
    "bias_by_row": Row(
        unsupported=(
            ("windows", "biases of windows are small, so there is nothing to save"),
            ("content", _BIASES_ONLY),
            _HALF_SCALED_KEYS,
            ("mask", "it has no mask and no dropout of attention weights"),
            ("dropout", "it has no mask and no dropout of attention weights"),
            ("last-queries", "it needs the queries of the whole grid, not of its last rows"),
            ("not bias", "there is no bias table, so there is nothing to save"),
            ("not cpu", "it is slow on {device}: every block of image rows needs its own kernel launch"),
            ("graph", "a graph would contain every block of image rows, and serve a single grid"),
            ("transformed", "its backward pass supports backward() only, no transforms of torch.func and no forward mode"),
        ),
        preferred=(
            ("graph", NEVER),  # a branch on the size would need another compiled graph
            ("gradients not learned-bias", 4096),
            ("gradients not several-biases", 1024),
            ("", 784),
        ),
    ),
    # Speed relative to sdpa with one image and one thread of an EPYC: content tables forward 0.96 at 28x28 and 2.75 at 64x64,
    # in training 0.81 and 1.46 (results/benchmark/amd-epyc/ops).
    "augmented_qk": Row(
        unsupported=(
            ("windows", "shifted and padded windows need a mask, which flash attention does not take"),
            (
                "table-hw",
                "a table over 'hw' cannot be written as columns: it is in general not a sum of tables over 'h' and 'w'",
            ),
            (
                "not tables",
                "there is no table to write as columns: plain scaled_dot_product_attention computes these terms",
            ),
            _SCALED_KEYS,
            ("mask", "flash attention takes no mask"),
            ("dropout cpu", "flash attention has no dropout on a CPU"),
            ("float64 not cpu", "flash attention has no float64 on {device}"),
            ("gated half", "gated tables of several axes can cancel, so columns in half precision would be too coarse"),
        ),
        limits=augmented_qk.limits,
        preferred=(
            ("graph", NEVER),  # torch.compile would need another graph, and torch.export refuses the choice
            ("not cpu", NEVER),
            # Only the reference also serves values; for gated tables of three axes sdpa gathers three [N, N] (pape with 12
            # heads, over sdpa: 14x14 1.2 forward and 1.5 in training, 24x24 1.5 and 1.5, 64x64 2.2 and 1.4).
            ("value", 196),
            ("gated", 196),
            # A mask of biases is computed once for all images, but extra columns are multiplied for each image.
            ("not content many-columns", NEVER),
            ("not content gradients", 4096),
            ("gradients", 2304),
            ("", 1024),
        ),
    ),
    # In evaluation Swin models were 1.01 to 1.12 times as fast as with sdpa; no gain in training (1.01).
    "window_kinds": Row(
        unsupported=(
            ("not windows", "it groups windows, and global attention has none"),
            ("value", "scaled_dot_product_attention cannot add position-dependent values (Table.value) to its output"),
            _HALF_SCALED_KEYS,
            ("not cpu", "it is slow on {device}: every kind of window needs its own kernel launches"),
            ("recorded", "it reads the number of windows of each kind from a tensor, which a graph cannot do"),
        ),
        preferred=(("gradients", NEVER), ("", 0)),
    ),
    # Not yet measured on a GPU, and on a CPU slower than the others.
    "flex": Row(
        unsupported=(
            ("windows", "flex_attention computes blocks of 128 tokens, of which a window fills a part only (7x7: 49)"),
            ("value", "flex_attention cannot add position-dependent values (Table.value) to its output"),
            _SCALED_KEYS,
            ("no-images", "flex_attention has no batches of 0 images"),
            ("dropout", "flex_attention has no dropout of attention weights"),
            ("gradients cpu", "flex_attention has no backward on a CPU"),
            (
                "gradients deterministic",
                "flex_attention adds gradients of tables in no fixed order, but torch.use_deterministic_algorithms is on",
            ),
            ("cpu compiled", "compiled for a CPU, flex_attention cannot use an index that is itself looked up"),
            ("float64 not cpu", "compiled flex_attention has no float64"),
        ),
    ),
    "sdpa": Row(
        unsupported=(
            ("value", "scaled_dot_product_attention cannot add position-dependent values (Table.value) to its output"),
            _HALF_SCALED_KEYS,
        ),
        preferred=(("", 0),),
    ),
    "reference": Row(preferred=(("", 0),)),
}


def refusal(name: str, call: Call) -> str:
    """Return the reason why a backend does not serve a call, "" if it does."""
    row = TABLE[name]
    for words, reason in row.unsupported:
        if has(call, words):
            return reason.replace("{device}", call.device.type)
    return row.limits(call) if row.limits is not None else ""


def preferred(name: str, call: Call) -> bool:
    """Return whether "auto" takes a backend, if it serves the call and no earlier one is taken."""
    for words, tokens in TABLE[name].preferred:
        if has(call, words):
            return tokens == 0 or (tokens != NEVER and call.grid.tokens >= tokens)
    return False


def has(call: Call, words: str) -> bool:
    """Return whether a call has all of the words, for example "gradients not cpu"; True for ""."""
    wanted = True
    for word in words.split():
        if word == "not":
            wanted = False
            continue
        if WORDS[word](call) is not wanted:
            return False
        wanted = True
    return True
