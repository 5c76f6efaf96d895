"""Plans of the meshes that hold a model on given GPUs: bytes of each GPU by kind, the pipeline
bubble, traffic, and the mesh to take. The formulas are in docs/MODELS.md.

Pure: shapes and GPUs in, plans out. Nothing is measured; peaks and bandwidths are the makers'.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.core.mesh import DP_REPLICATE, MOST, ModelMesh
from harness.core.world import BadInput
from harness.meshes.model_shapes import ModelShape

# bytes per element: parameters, operands of matrix products, gradients, AdamW's two moments
MASTER, COMPUTED, REDUCED, MOMENTS = 4, 2, 4, 8
LOGIT_NBYTES = 12  # fp32: values kept for the backward, their gradient, and that of the logits
USABLE = 0.9  # of a GPU's memory; the rest: CUDA's context, NCCL's buffers, fragmentation
REACHED = 0.5  # of a GPU's peak, while it waits for nothing
NEAR = 1.05  # step times up to this factor above the fastest count as equal
LEAST_POSITIONS = 2048  # of a sample on one rank of `cp`: with fewer, matrix products are too small


@dataclass(frozen=True)
class PlannedGpus:
    """The GPUs to plan for. `name`: such as "H100". `flops`: peak of one GPU in bf16; `inside`,
    `across`: bytes per second that one GPU sends to others of its node, and to other nodes."""

    name: str
    memory: float  # bytes
    flops: float
    per_node: int
    nodes: int
    inside: float
    across: float

    @property
    def count(self) -> int:
        return self.per_node * self.nodes


@dataclass(frozen=True)
class MeshBytes:
    """Memory of the GPU that holds most, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float  # parameters of blocks that are gathered for forward and backward
    logits: float

    @property
    def total(self) -> float:
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.gathered + self.logits


@dataclass(frozen=True)
class MeshTraffic:
    """Bytes that one GPU sends in a step: to others of its node, and to other nodes."""

    inside: float
    across: float


@dataclass(frozen=True)
class MeshPlan:
    """A mesh with its costs. `copies`: of the model (dp_replicate). `micro_batches`: per replica
    and step, of `micro_batch` samples each. `step_s`: estimated seconds of a step; `bubble`: the
    share of them in which pipeline stages wait."""

    mesh: ModelMesh
    copies: int
    micro_batch: int
    micro_batches: int
    checkpointing: bool
    nbytes: MeshBytes
    traffic: MeshTraffic
    bubble: float
    step_s: float

    @property
    def dimensions(self) -> int:
        """Number of dimensions larger than 1, besides copies."""
        return sum(size > 1 for size in vars(self.mesh).values())


def best_plans(
    shape: ModelShape, gpus: PlannedGpus, global_batch: int, sequence: int
) -> tuple[MeshPlan, ...]:
    """Return the best plan of each mesh, the fastest first; then, for each mesh that does not hold
    the model, the plan that needs least memory. Raises BadInput for a batch that no mesh can
    divide, for samples that are too long, and for too many GPUs."""
    if shape.family == "gpt2" and sequence > shape.length:
        raise BadInput(f"wanted samples of at most {shape.length} tokens, found {sequence}")
    if gpus.count > MOST:
        raise BadInput(f"wanted at most {MOST} GPUs, found {gpus.count}")
    found, too_large = [], []
    for mesh, copies in meshes(shape, gpus, sequence):
        plans = list(_plans(shape, gpus, mesh, copies, global_batch, sequence))
        if fit := [plan for plan in plans if fits_memory(plan, gpus)]:
            found.append(min(fit, key=_preferred))
        elif plans:
            too_large.append(min(plans, key=_size))
    if not found and not too_large:
        raise BadInput(
            f"wanted a global batch that replicas of {gpus.count} GPUs share out evenly, found "
            f"{global_batch}; use a multiple of {gpus.count}, or of a power of two"
        )
    return (*sorted(found, key=_preferred), *sorted(too_large, key=_size))


def fits_memory(plan: MeshPlan, gpus: PlannedGpus) -> bool:
    return plan.nbytes.total <= USABLE * gpus.memory


def plan_to_take(plans: Sequence[MeshPlan]) -> MeshPlan:
    """Return the plan to take: the simplest of those about as fast as the fastest. `plans`: those
    that fit, the fastest first."""
    near = [plan for plan in plans if plan.step_s <= NEAR * plans[0].step_s]
    return min(near, key=lambda plan: (plan.dimensions, plan.step_s))


def _size(plan: MeshPlan) -> float:
    return plan.nbytes.total


def _preferred(plan: MeshPlan) -> tuple[float, int, float]:
    """Return the sort key of a plan: faster ones first, then simpler ones, then smaller ones."""
    return round(plan.step_s, 3), plan.dimensions, plan.nbytes.total


def meshes(shape: ModelShape, gpus: PlannedGpus, sequence: int) -> Iterator[tuple[ModelMesh, int]]:
    """Yield every mesh that these GPUs can form, with its number of copies. `tp` stays inside a
    node; pipeline stages have about equally many layers, at least two on average."""
    for tp in _divisors(gpus.per_node):
        if shape.kv_heads % tp or shape.hidden % tp or (shape.experts and tp > 1):
            continue
        for pp in _divisors(gpus.count // tp):
            if pp > shape.layers // 2 and pp > 1:
                continue
            for cp in _divisors(gpus.count // tp // pp):
                if cp > 1 and (sequence // cp < LEAST_POSITIONS or cp & (cp - 1)):
                    continue
                for dp_shard in _divisors(gpus.count // tp // pp // cp):
                    copies = gpus.count // (tp * pp * cp * dp_shard)
                    for ep in _divisors(math.gcd(dp_shard, shape.experts or 1)):
                        made = ModelMesh(pp=pp, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)
                        yield made, copies


@functools.cache
def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _plans(
    shape: ModelShape,
    gpus: PlannedGpus,
    mesh: ModelMesh,
    copies: int,
    global_batch: int,
    sequence: int,
) -> Iterator[MeshPlan]:
    """Yield a plan for every micro-batch size, with and without activation checkpointing."""
    each, left = divmod(global_batch, copies * mesh.dp_shard)
    if left or not each:
        return
    far = crossing(mesh, copies, gpus.per_node)
    for power in range((each & -each).bit_length()):  # the powers of two that divide `each`
        micro_batch = 1 << power
        count = each // micro_batch
        for checkpointing in (False, True):
            how = micro_batch, count, checkpointing, sequence
            sent = by_word(shape, mesh, copies, *how)
            across = sum(nbytes for name, nbytes in sent.items() if name in far)
            plan = MeshPlan(
                mesh,
                copies,
                micro_batch,
                count,
                checkpointing,
                memory(shape, mesh, *how),
                MeshTraffic(sum(sent.values()) - across, across),
                (mesh.pp - 1) / (count + mesh.pp - 1),
                0.0,
            )
            sent_s = {
                name: nbytes / (gpus.across if name in far else gpus.inside)
                for name, nbytes in sent.items()
            }
            yield replace(plan, step_s=_step_s(shape, gpus, plan, sent_s, sequence))


# ---- memory --------------------------------------------------------------------------------------
def stage_parameters(shape: ModelShape, mesh: ModelMesh) -> float:
    """Return the parameters of the greatest pipeline stage that one rank of `tp` has."""
    layers = -(-shape.layers // mesh.pp)
    ends = (shape.embedding_parameters / mesh.tp, shape.head_parameters / mesh.tp)
    # a tied head needs the embedding on the last stage
    last = ends[1] + (ends[0] if shape.tied else 0)
    return layers * block_parameters(shape, mesh) + (
        max(ends[0], last) if mesh.pp > 1 else sum(ends)
    )


def block_parameters(shape: ModelShape, mesh: ModelMesh, gathered: bool = False) -> float:
    """Return the parameters of one layer on one rank of `tp`. `gathered`: of the experts, only
    those of one rank of `ep`, as when a layer is gathered."""
    experts = shape.mlp_parameters * max(1, shape.experts)
    matrices = shape.attention_parameters + experts / (mesh.ep if gathered else 1)
    return matrices / mesh.tp + shape.router_parameters + shape.vector_parameters


def token_nbytes(shape: ModelShape) -> float:
    """Return the bytes that one layer keeps of one token for its backward, in 16 bits, with
    attention that keeps no scores: inputs of norms and matrix products, queries, keys, values, the
    attention output, and both factors of the MLP's elementwise product."""
    d, q, kv = shape.dim, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # both norms' inputs and outputs; queries and keys before and after rotation; values; output
    attention = 4 * d + 2 * q + 3 * kv
    if shape.family == "gpt2":
        return COMPUTED * (4 * d + 2 * q + 2 * kv + 2 * shape.hidden)
    inner = 4 * shape.hidden  # gate, its SiLU, up, their product
    if shape.experts:  # plus the input and output of each chosen expert
        inner = shape.experts_per_token * (4 * shape.hidden + 3 * d)
    return COMPUTED * (attention + inner)


def memory(
    shape: ModelShape,
    mesh: ModelMesh,
    micro_batch: int,
    micro_batches: int,
    checkpointing: bool,
    sequence: int,
) -> MeshBytes:
    """Return the memory of the GPU that holds most. For a pipeline this adds up the first stage,
    which holds activations of as many micro-batches as there are stages, and the last's logits."""
    shards = mesh.dp_shard * mesh.cp
    held = stage_parameters(shape, mesh)
    layers = -(-shape.layers // mesh.pp)
    tokens = micro_batch * sequence / (mesh.cp * mesh.tp)  # norms are split by positions as well
    waiting = min(mesh.pp, micro_batches)
    block = tokens * token_nbytes(shape)
    kept = tokens * shape.dim * COMPUTED  # a block's input
    activations = waiting * layers * (kept if checkpointing else block)
    # gradients are scattered to their shards only after the last micro-batch
    whole = held * REDUCED if micro_batches > 1 and shards > 1 else 0.0
    together = block_parameters(shape, mesh, gathered=True)
    ends = max(shape.embedding_parameters, shape.head_parameters) / mesh.tp
    # the current block, the next one, and the gradient of one; or the embedding and its gradient
    gathered = max(3 * together, 2 * ends) * COMPUTED
    if mesh.copy_ranks == 1:  # autocast keeps all rounded parameters
        gathered = held * COMPUTED
    return MeshBytes(
        parameters=held * MASTER / shards,
        gradients=held * REDUCED / shards + whole,
        optimizer=held * MOMENTS / shards,
        activations=activations + (block if checkpointing else 0.0),
        gathered=gathered,
        logits=LOGIT_NBYTES * micro_batch * sequence / mesh.cp * shape.vocab,
    )


# ---- traffic -------------------------------------------------------------------------------------
def by_word(
    shape: ModelShape,
    mesh: ModelMesh,
    copies: int,
    micro_batch: int,
    micro_batches: int,
    checkpointing: bool,
    sequence: int,
) -> dict[str, float]:
    """Return the bytes that one GPU sends in a step, by the mesh dimension they are sent over."""
    layers, passes = -(-shape.layers // mesh.pp), 3 if checkpointing else 2
    held, shards = stage_parameters(shape, mesh), mesh.dp_shard * mesh.cp
    experts = layers * shape.mlp_parameters * shape.experts / mesh.tp
    own = held - experts * (1 - 1 / mesh.ep)  # gathered parameters: of the experts only its own
    tokens = micro_batch * sequence / mesh.cp
    row = tokens * shape.dim * COMPUTED  # the residual stream of a micro-batch
    keys = 2 * tokens * shape.kv_heads * shape.head_dim * COMPUTED / mesh.tp
    return {
        # gathers for each forward and backward; one scatter of gradients
        "dp_shard": _part(shards) * own * (2 * micro_batches * COMPUTED + REDUCED),
        # all-reduce of a rank's shard
        DP_REPLICATE: 2 * _part(copies) * held * REDUCED / shards,
        # a gather and a scatter around attention and around the MLP, in each pass
        "tp": micro_batches * layers * passes * 4 * _part(mesh.tp) * row,
        # keys and values go around a ring; in the backward their gradients as well
        "cp": micro_batches * layers * (passes + 1) * (mesh.cp - 1) * keys,
        "pp": 2 * micro_batches * row / mesh.tp if mesh.pp > 1 else 0.0,
        # to the experts and back
        "ep": micro_batches * layers * passes * 2 * _part(mesh.ep) * row * shape.experts_per_token,
    }


def _part(ranks: int) -> float:
    """Return the share of a tensor that a rank sends in a gather or scatter over `ranks` ranks."""
    return (ranks - 1) / ranks


def crossing(mesh: ModelMesh, copies: int, per_node: int) -> frozenset[str]:
    """Return the dimensions whose ranks do not all lie in one node. The innermost dimension varies
    fastest."""
    sizes = {"tp": mesh.tp, "cp": mesh.cp, "dp_shard": mesh.dp_shard, "pp": mesh.pp}
    sizes[DP_REPLICATE] = copies
    found, ranks = set(), 1
    for name, size in sizes.items():
        if name == "dp_shard" and mesh.ep > 1 and per_node % (ranks * mesh.ep):
            found.add("ep")
        ranks *= size
        if size > 1 and per_node % ranks:
            found.add(name)
    return frozenset(found)


# ---- time ----------------------------------------------------------------------------------------
def _step_s(
    shape: ModelShape,
    gpus: PlannedGpus,
    plan: MeshPlan,
    sent: Mapping[str, float],
    sequence: int,
) -> float:
    """Return the estimated seconds of a step: compute, overlapped with the transfer of parameters,
    keys and gradients, plus the transfers that block. `sent`: seconds by mesh dimension."""
    mesh = plan.mesh
    samples = plan.copies * mesh.dp_shard * plan.micro_batch * plan.micro_batches
    flops = samples * sequence * shape.flops_per_token(sequence) / gpus.count
    # slowdown by layers that do not divide evenly between the stages
    uneven = -(-shape.layers // mesh.pp) * mesh.pp / shape.layers
    computed = uneven * flops * (4 / 3 if plan.checkpointing else 1) / (REACHED * gpus.flops)
    beside = sent["dp_shard"] + sent["cp"]
    waited = sent["tp"] + sent["ep"]
    # the exchange between copies overlaps only with the last backward
    left = max(0.0, sent[DP_REPLICATE] - computed * 2 / 3 / plan.micro_batches)
    return (max(computed, beside) + waited) / (1 - plan.bubble) + left + sent["pp"]
