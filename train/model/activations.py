"""Bytes that autograd keeps of one micro-batch for the backward pass, and what it works with beside them. No torch.

Special here:
- counted as autograd keeps them, a storage at a time: a view keeps all of what it looks into, so a value that is a view
  of the fused product keeps queries and keys before their rotation as well;
- attention keeps other things by device and precision: PyTorch's fused kernels their inputs, output and one number a
  query; our blocks for bf16 on CPUs (`attention.py`) the softmax itself;
- under sequence parallelism a column product keeps only its own rows of the input, and gathers the rest again.

Korthikanti et al. 2022, arXiv 2205.05198, section 4 has the same count for another block.
"""

from __future__ import annotations

from .shape import Share

FP32, INDEX = 4, 8  # bytes of an fp32 number, and of a token's id

# What kernels and planner must agree on stands here, where planning can read it without torch.
# Context up to which bf16 on CPUs keeps the softmax of a training step, (batch, heads, T, T) numbers a layer.
LONGEST_KEPT = 512
# Logits that are worked on at a time in fp32: on CPUs what fits the cache, elsewhere what keeps the calls few.
LOGITS_AT_A_TIME = {"cpu": 2**18, "cuda": 2**25}
# Rows of them at least, for each adds once to the fp32 gradient of the whole table, which must be little beside the
# products that they take: on a GPU 8 bytes an element against 6 FLOPs a row and element.
FEWEST_ROWS = {"cpu": 256, "cuda": 4096}


def rows_at_a_time(vocabulary: int, device: str) -> int:
    """Tokens whose logits exist together in `loss.linear_cross_entropy`."""
    return max(LOGITS_AT_A_TIME[device] // vocabulary, FEWEST_ROWS[device])


def query_block(length: int) -> int:
    """Queries in a block of attention on CPUs: four skip 3/8 of the square, and below 128 calls cost more."""
    return max(128, -(-length // 4))


def visible_blocks(length: int, block: int, window: int | None = None) -> list[tuple[int, int, int]]:
    """(first key, first query, end of both) of blocks of queries, each with the keys that any of them sees."""
    starts = range(0, length, block)
    return [(max(0, start - (window or length) + 1), start, min(start + block, length)) for start in starts]


def kept_by_block(share: Share, recompute: str, device: str) -> dict[str, int]:
    """Bytes kept of one block, by what keeps them.

    Args:
        share: of the rank.
        recompute: none | selective | full.
        device: cpu | cuda.
    """
    stream = share.rows * share.width * share.itemsize
    if recompute == "full":
        return {"stream": stream}
    inner = share.tokens * share.hidden * share.itemsize
    kept = {"stream": 2 * stream, "query, key and value": 0, "gate and up": 2 * inner}
    if recompute == "selective":
        return kept | {"query, key and value": product_bytes(share)}
    return kept | {
        "norms": 2 * stream + 2 * share.rows * FP32,  # what they give, and one number a token
        "query, key and value": product_bytes(share) if keeps_product(share, device) else 0,
        "attention": attention_bytes(share, device),
        "SwiGLU": inner,
    }


def product_bytes(share: Share) -> int:
    """The fused product of query, key and value."""
    return share.tokens * (share.heads + 2 * share.kv_heads) * share.head_dim * share.itemsize


def heads_bytes(share: Share, heads: int) -> int:
    """A query, key or value of so many heads."""
    return share.tokens * heads * share.head_dim * share.itemsize


def keeps_softmax(share: Share, device: str) -> bool:
    """Whether attention runs in our blocks, which keep their softmax, and copies of what they read."""
    return device == "cpu" and share.precision == "bf16" and share.length <= LONGEST_KEPT


def repeats_heads(share: Share, device: str) -> bool:
    """Whether PyTorch's kernel needs key and value once for every query head: on GPUs those of fp32 do."""
    return share.heads > share.kv_used and device == "cuda" and share.precision == "fp32"


def keeps_product(share: Share, device: str) -> bool:
    """Whether something that is kept is a view of the fused product: a value, or what the norms of heads read."""
    copied = share.heads > 1 if keeps_softmax(share, device) else repeats_heads(share, device)
    return share.head_norms or not copied


def attention_bytes(share: Share, device: str) -> int:
    """Kept between the product for query, key and value and the one for the output, the latter's input included."""
    queries = heads_bytes(share, share.heads)
    rotated = heads_bytes(share, share.heads + share.kv_heads)  # queries and keys, of which both are views
    if keeps_softmax(share, device):  # a single head needs no copy of its key and value
        kept = softmax_bytes(share) + (4 * queries if share.heads > 1 else 2 * queries + rotated)
    elif repeats_heads(share, device):  # the value is no view any more
        kept = (queries if share.head_norms else rotated) + 3 * queries
    else:
        kept = rotated + queries
        if has_mask(share, device) and share.length > query_block(share.length):
            kept += queries  # what the blocks of queries give, before they are one
    if not keeps_softmax(share, device):
        kept += share.tokens * share.heads * FP32  # the logarithm of each query's normaliser
    if share.head_norms:
        kept += share.tokens * (share.heads + share.kv_heads) * FP32
    return kept


def softmax_bytes(share: Share) -> int:
    """Weights of the blocks of `attention._BlockAttention`, each of some queries against the keys that they see."""
    return share.sequences * share.heads * sum(softmax_blocks(share)) * share.itemsize


def softmax_blocks(share: Share) -> list[int]:
    """Weights of one head in each block."""
    blocks = visible_blocks(share.length, query_block(share.length), share.window)
    return [(end - start) * (end - low) for low, start, end in blocks]


def has_mask(share: Share, device: str) -> bool:
    """Whether a window or documents are said by a mask, as PyTorch's kernels want it; ours for GPUs has no need."""
    return device == "cpu" and (share.window is not None or share.documents)


def mask_bytes(share: Share, recompute: str, device: str) -> int:
    """The mask, which all blocks share; those that keep their softmax do not ask for it again."""
    if not has_mask(share, device) or (recompute == "none" and keeps_softmax(share, device)):
        return 0
    return (share.sequences if share.documents else 1) * share.length**2 * share.itemsize


def kept_by_head(share: Share) -> int:
    """Bytes kept from the last block to the loss: the final norm's, and what the loss has ready for the backward pass.

    That are its derivatives by the head's input and, in fp32, by its weights. Under tensor parallelism they are input
    and logits, with each token's place among these columns, whether it has one, and its normaliser.
    """
    norm = share.rows * (2 * share.width * share.itemsize + FP32)
    if not share.split:
        return norm + share.table * FP32
    return norm + share.tokens * (share.vocabulary * share.itemsize + INDEX + 1 + FP32)


def norm_workspace(share: Share, device: str) -> int:
    """Derivatives in the backward pass of a norm: on CPUs two or four more in fp32, on GPUs two alone."""
    stream = share.rows * share.width
    wide = 0 if device == "cuda" else 2 if share.precision == "fp32" else 4
    return 2 * stream * share.itemsize + wide * stream * FP32


def loss_workspace(share: Share, device: str) -> int:
    """Bytes beside what `kept_by_head` counts, from the loss back to the last block: the most at any of some moments,
    each with less of that left.

    They are the loss's own, the head's, and the final norm's.
    """
    if share.split:
        return _split_loss_workspace(share, device)
    stream, table = share.rows * share.width * share.itemsize, share.table * share.itemsize
    chunk = min(rows_at_a_time(share.vocabulary, device), share.tokens) * share.vocabulary
    narrow = share.itemsize < FP32
    # On CPUs the softmax beside the logits, in low precision both in fp32 beside them.
    softmax = 0 if device == "cuda" else (2 if narrow else 1) * chunk * FP32
    product = table if narrow and device == "cpu" else 0  # a chunk's term of the weights' derivative
    forward = stream + chunk * share.itemsize + max(softmax, product)
    head = table if narrow else 0  # the weights' derivative in their own type; from here on, if tied, it waits
    norm = norm_workspace(share, device) - stream - share.table * FP32 + (table if share.tied else 0)
    return max(forward, head, norm)


def _split_loss_workspace(share: Share, device: str) -> int:
    """`loss_workspace` of a tensor-parallel rank."""
    logits, whole = share.tokens * share.vocabulary, share.tokens * share.width * share.itemsize
    # The derivative takes the logits' place, in low precision through fp32: some rows, and those before them.
    chunk = max(LOGITS_AT_A_TIME[device], share.vocabulary)
    derivative = min(logits, 2 * chunk) * FP32 if share.itemsize < FP32 else 0
    gathered = whole if share.rows < share.tokens else 0
    products = logits * share.itemsize + gathered + whole + share.table * share.itemsize
    return max(derivative, products - logits * share.itemsize, norm_workspace(share, device) - logits * share.itemsize)


def block_workspace(share: Share, recompute: str, device: str) -> int:
    """Bytes beside what all blocks keep while one goes backward: the most at any of four moments.

    They are SwiGLU's (derivatives of the inner activation, of gate and up, and one of a half), the first product's of
    the MLP (its input, gathered, and the derivative of that), its norm's, and attention's (derivatives of all that goes
    in and out). Before each some of what the block kept has been freed. The stream's derivative is there throughout.
    """
    stream, whole = share.rows * share.width * share.itemsize, share.tokens * share.width * share.itemsize
    inner = share.tokens * share.hidden * share.itemsize
    gathered = whole if share.rows < share.tokens else 0
    norm = norm_workspace(share, device)
    mixing = 4 * heads_bytes(share, share.heads) + product_bytes(share)
    if keeps_softmax(share, device):  # derivatives of the weights and of the scores, a block of queries at a time
        mixing += 2 * share.sequences * share.heads * max(softmax_blocks(share)) * share.itemsize
    if recompute == "selective":
        again = attention_bytes(share, device)
        moments = (4 * inner, stream + gathered + whole, norm - 2 * inner, again + mixing - 2 * inner - stream)
        return stream + max(moments)
    again = sum(kept_by_block(share, "none", device).values()) - stream if recompute == "full" else 0
    moments = (3 * inner, gathered + whole - inner, norm - 3 * inner - stream, mixing - 3 * inner - 2 * stream)
    return stream + again + max(moments)
