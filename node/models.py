"""Models and drafters as data: where their weights come from, how large they are, what they need from the server.

Sizes of Kimi K2.6 follow from its architecture (config.json) and agree with the published census of its tensors,
595,148,192,736 bytes, within 0.1 percent; the unit test of this module holds that.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.questions import Question, of_readiness

BFLOAT16 = 2
INT4_GROUP_32 = 0.5 + BFLOAT16 / 32  # bytes per weight: four bits, and one bfloat16 scale for every 32 weights


@dataclass(frozen=True)
class Architecture:
    """What decides bytes. Fields are config.json's; the attention is multi-head latent attention (MLA)."""

    layers: int
    dense_layers: int
    hidden: int
    dense_intermediate: int
    experts: int
    shared_experts: int
    expert_intermediate: int
    expert_bytes_per_weight: float
    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head: int
    qk_rope_head: int
    v_head: int
    vocabulary: int
    vision_bytes: int

    @property
    def attention_bytes(self) -> int:
        """Bytes of one layer's attention, bfloat16."""
        head = self.qk_nope_head + self.qk_rope_head
        weights = (
            self.hidden * self.q_lora_rank
            + self.q_lora_rank * self.heads * head
            + self.hidden * (self.kv_lora_rank + self.qk_rope_head)
            + self.kv_lora_rank * self.heads * (self.qk_nope_head + self.v_head)
            + self.heads * self.v_head * self.hidden
        )
        return weights * BFLOAT16

    @property
    def experts_bytes(self) -> int:
        """Bytes of one layer's routed experts."""
        return int(self.experts * 3 * self.hidden * self.expert_intermediate * self.expert_bytes_per_weight)

    @property
    def moe_layer_bytes(self) -> int:
        shared = self.shared_experts * 3 * self.hidden * self.expert_intermediate * BFLOAT16
        router = self.hidden * self.experts * BFLOAT16
        return self.experts_bytes + shared + router + self.attention_bytes

    @property
    def dense_layer_bytes(self) -> int:
        return 3 * self.hidden * self.dense_intermediate * BFLOAT16 + self.attention_bytes

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the input embedding; the output head is as large and is not tied to it."""
        return self.vocabulary * self.hidden * BFLOAT16

    def layer_bytes(self, layer: int) -> int:
        return self.dense_layer_bytes if layer < self.dense_layers else self.moe_layer_bytes

    @property
    def total_bytes(self) -> int:
        layers = sum(self.layer_bytes(layer) for layer in range(self.layers))
        return layers + 2 * self.embedding_bytes + self.vision_bytes

    def kv_bytes_per_token_and_layer(self, bytes_per_value: float) -> float:
        """MLA keeps one compressed vector and one rotary key a layer, the same on every tensor-parallel rank."""
        return (self.kv_lora_rank + self.qk_rope_head) * bytes_per_value


@dataclass(frozen=True)
class Model:
    """One model as served.

    revision: 40 hex digits, or None when the owner must give one (key `revision`). bytes: of the files to fetch, about,
    for messages; the manifest has the exact ones. architecture: None when the model is too small to plan memory for.
    context_tokens: the longest context the model was made for. device: "cuda", or "cpu" for the lab's stand-in model.
    questions: what it must answer to be ready; the first is a short one, for whoever wants one answer.
    """

    key: str
    repository: str
    revision: str | None
    bytes: int
    architecture: Architecture | None
    context_tokens: int
    trust_remote_code: bool
    tool_call_parser: str | None
    reasoning_parser: str | None
    device: str
    questions: tuple[Question, ...]
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drafter:
    """A speculative drafter for one target. memory_bytes: its weights in GPU memory, over all tensor-parallel ranks."""

    key: str
    repository: str
    revision: str | None
    algorithm: str
    bytes: int
    layers: int
    block_size: int
    kv_bytes_per_token: int
    gated: bool
    targets: tuple[str, ...]


KIMI_K26_ARCHITECTURE = Architecture(
    layers=61,
    dense_layers=1,
    hidden=7168,
    dense_intermediate=18432,
    experts=384,
    shared_experts=1,
    expert_intermediate=2048,
    expert_bytes_per_weight=INT4_GROUP_32,
    heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head=128,
    qk_rope_head=64,
    v_head=128,
    vocabulary=163840,
    vision_bytes=900_000_000,  # projector and vision tower, shards 63 and 64 of the checkpoint, under 1 GB together
)

MODELS = {
    model.key: model
    for model in (
        Model(
            key="kimi-k2.6",
            repository="moonshotai/Kimi-K2.6",
            # The newest revision seen pinned in public (tinker-cookbook PR 710, 2026-05-15). Remote code runs from it.
            revision="b5aabbfb20227ed42becbf5541dbffd213942c58",
            bytes=595_174_000_000,
            architecture=KIMI_K26_ARCHITECTURE,
            context_tokens=262_144,
            trust_remote_code=True,
            tool_call_parser="kimi_k2",
            reasoning_parser="kimi_k2",
            device="cuda",
            # 2000 drawers are 17,012 tokens (counted with the published vocabulary): more than one chunk of SGLang's
            # prefill, 8192 tokens on a GPU of less than 160 GiB and 16384 on a larger one (server_args.py, 0.5.12.post1
            # to 0.5.23), and far more than a page of its prefix cache, 1 or 64 tokens by attention backend.
            questions=of_readiness(drawers=2000, max_tokens=256, thinking=3840),
            drafters=("kimi-k2.6-dflash-tmp-long", "kimi-k2.6-dflash"),
        ),
        Model(
            key="lab-tiny",
            repository="kimi-nodes-lab/tiny-kimi",
            revision=None,
            bytes=2_000_000,
            architecture=None,
            context_tokens=2048,
            trust_remote_code=False,
            tool_call_parser="kimi_k2",
            reasoning_parser=None,
            device="cpu",
            questions=of_readiness(drawers=16, max_tokens=96, thinking=0),  # its tokens are bytes
        ),
    )
}

# Six layers, hidden 7168, 8 key-value heads of 128, bfloat16: 3,479,222,784 parameters, and 2 x 8 x 128 values a layer
# and token of KV cache.
_DFLASH_BYTES = 3_479_222_784 * BFLOAT16
_DFLASH_KV_BYTES_PER_TOKEN = 6 * 2 * 8 * 128 * BFLOAT16

DRAFTERS = {
    drafter.key: drafter
    for drafter in (
        Drafter(
            key="kimi-k2.6-dflash-tmp-long",
            repository="SubSir/Kimi-K2.6-DFlash-tmp-long",
            # No public pin is known, and a personal "-tmp" repository can vanish: the owner pins and mirrors it.
            revision=None,
            algorithm="dflash",
            bytes=_DFLASH_BYTES,
            layers=6,
            block_size=8,
            kv_bytes_per_token=_DFLASH_KV_BYTES_PER_TOKEN,
            gated=False,
            targets=("kimi-k2.6",),
        ),
        Drafter(
            key="kimi-k2.6-dflash",
            repository="z-lab/Kimi-K2.6-DFlash",
            revision="c1462ef46589f6ccb3eca424bffef94d72354ea9",
            algorithm="dflash",
            bytes=_DFLASH_BYTES,
            layers=6,
            block_size=8,
            kv_bytes_per_token=_DFLASH_KV_BYTES_PER_TOKEN,
            gated=True,  # approved by hand (z-lab/dflash issue 87): wants a hub token
            targets=("kimi-k2.6",),
        ),
    )
}
