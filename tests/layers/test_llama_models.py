"""Whole Llama-like models by logits: a checkpoint's own arithmetic in plain torch, written here, is the judge.

Shapes hide permutations, so every test compares logits and never names or shapes alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import te_ops as te
from te_ops import layers
from te_ops.errors import Error, PlanError

F64 = torch.float64
VOCAB, N, FFN, L, H, HK, D = 40, 16, 24, 3, 4, 2, 8  # heads of 8 features although 16 / 4 is 4
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
HF = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": N, "intermediate_size": FFN, "num_hidden_layers": L,
    "num_attention_heads": H, "num_key_value_heads": HK, "head_dim": D, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
}  # fmt: skip
META = {
    "dim": N, "n_layers": L, "n_heads": H, "n_kv_heads": HK, "head_dim": D, "hidden_dim": FFN, "norm_eps": 1e-5,
    "rope_theta": 500000.0, "vocab_size": -1,
}  # fmt: skip
QWEN_WINDOW = {"model_type": "qwen3", "sliding_window": 4, "use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 4.0}
TOKENS = torch.randint(VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
Naming = Literal["hugging_face", "meta"]


def checkpoint(
    naming: Naming, *, tied: bool = False, qk_norm: bool = False, bias: bool = False
) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(7)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=F64)

    hf = naming == "hugging_face"
    state = {"model.embed_tokens.weight" if hf else "tok_embeddings.weight": made(VOCAB, N)}
    state["model.norm.weight" if hf else "norm.weight"] = made(N)
    if not tied:
        state["lm_head.weight" if hf else "output.weight"] = made(VOCAB, N)
    names = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
         "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
        if hf else
        ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w3",
         "feed_forward.w2", "attention_norm", "ffn_norm")
    )  # fmt: skip
    shapes = (
        (H * D, N),
        (HK * D, N),
        (HK * D, N),
        (N, H * D),
        (FFN, N),
        (FFN, N),
        (N, FFN),
        (N,),
        (N,),
    )
    for i in range(L):
        at = f"model.layers.{i}." if hf else f"layers.{i}."
        for name, shape in zip(names, shapes, strict=True):
            state[f"{at}{name}.weight"] = made(*shape)
            if bias and len(shape) == 2:
                state[f"{at}{name}.bias"] = made(shape[0])
        if qk_norm:
            state |= {f"{at}self_attn.{x}_norm.weight": made(D) for x in "qk"}
    return state


def scaled(inverse: float, scaling: dict[str, Any]) -> float:
    """Llama 3.1's rule for one frequency, in its own words: wavelengths."""
    wavelength = 2 * math.pi / inverse
    old = scaling["original_max_position_embeddings"]
    if wavelength < old / scaling["high_freq_factor"]:
        return inverse
    if wavelength > old / scaling["low_freq_factor"]:
        return inverse / scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (old / wavelength - low) / (high - low)
    return (1 - smooth) * inverse / scaling["factor"] + smooth * inverse


def turned(
    x: torch.Tensor, naming: Naming, base: float, scaling: dict[str, Any] | None
) -> torch.Tensor:
    """RoPE of x [b, s, h, D]: pairs (i, i + D/2) as Hugging Face, complex numbers as Meta."""
    inverse = [base ** (-2 * i / D) for i in range(D // 2)]
    inverse = inverse if scaling is None else [scaled(f, scaling) for f in inverse]
    angle = torch.arange(x.shape[1], dtype=F64)[:, None] * torch.tensor(inverse, dtype=F64)
    if naming == "meta":
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(
            pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
        ).flatten(-2)
    cos, sin = (torch.cat([t, t], -1)[:, None] for t in (angle.cos(), angle.sin()))
    return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin


def logits(
    state: dict[str, Any], naming: Naming, *, scaling: dict[str, Any] | None = None, base: float = 500000.0,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """The model in plain torch."""
    hf = naming == "hugging_face"
    q_, k_, v_, o_, gate, up, down, n1, n2 = (
        [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
        + ["input_layernorm", "post_attention_layernorm"]
        if hf else
        [f"attention.w{x}" for x in "qkvo"] + [f"feed_forward.w{x}" for x in (1, 3, 2)] + ["attention_norm", "ffn_norm"]
    )  # fmt: skip
    table = state["model.embed_tokens.weight" if hf else "tok_embeddings.weight"]
    x = table[TOKENS]
    s = TOKENS.shape[1]
    hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
    if window is not None:
        hidden |= torch.ones(s, s, dtype=torch.bool).tril(-window)
    for i in range(L):
        at = f"model.layers.{i}." if hf else f"layers.{i}."

        def dense(y: torch.Tensor, name: str, at: str = at) -> torch.Tensor:
            return F.linear(y, state[f"{at}{name}.weight"], state.get(f"{at}{name}.bias"))

        def norm(y: torch.Tensor, name: str, at: str = at) -> torch.Tensor:
            gamma = state.get(f"{at}{name}.weight")
            return y if gamma is None else F.rms_norm(y, y.shape[-1:], gamma, 1e-5)

        n = norm(x, n1)
        q, k, v = (dense(n, name).unflatten(-1, (-1, D)) for name in (q_, k_, v_))
        q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
        q, k = (turned(t, naming, base, scaling) for t in (q, k))
        k, v = (t.repeat_interleave(H // HK, 2) for t in (k, v))
        score = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
        p = score.masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + dense(torch.einsum("bhij,bjhd->bihd", p, v).flatten(2), o_)
        n = norm(x, n2)
        x = x + dense(F.silu(dense(n, gate)) * dense(n, up), down)
    x = F.rms_norm(x, (N,), state["model.norm.weight" if hf else "norm.weight"], 1e-5)
    return x @ state.get("lm_head.weight" if hf else "output.weight", table).t()


def built(config: layers.LlamaConfig, **options: Any) -> te.Sequential:
    return layers.llama_model(config, dtype=F64, **options)


# -- state dicts


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, SCALING])
def test_hugging_face(tied: bool, scaling: dict[str, Any] | None) -> None:
    state = checkpoint("hugging_face", tied=tied)
    config = HF | {"tie_word_embeddings": tied, "rope_scaling": scaling}
    model = built(layers.LlamaConfig.from_hugging_face(config))
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    model.load_state_dict(layers.from_llama(model, state | extra))
    torch.testing.assert_close(model(TOKENS), logits(state, "hugging_face", scaling=scaling))
    back = layers.to_llama(model)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("scaling", [None, SCALING | {"factor": 32.0}])
def test_meta(scaling: dict[str, Any] | None) -> None:
    state = checkpoint("meta")
    more = {"use_scaled_rope": True, "rope_scaling_factor": 32.0} if scaling else {}
    config = layers.LlamaConfig.from_meta(META | more, vocab_size=VOCAB, tied=False)
    model = built(config)
    model.load_state_dict(layers.from_llama(model, state, naming="meta"))
    torch.testing.assert_close(model(TOKENS), logits(state, "meta", scaling=scaling))
    back = layers.to_llama(model, naming="meta")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    other = layers.to_llama(model)  # the same model in the other names and order
    torch.testing.assert_close(logits(other, "hugging_face", scaling=scaling), model(TOKENS))
    wrong = {
        f"model.layers.{i}.self_attn.q_proj.weight": state[f"layers.{i}.attention.wq.weight"]
        for i in range(L)
    }
    assert not torch.allclose(logits(other | wrong, "hugging_face", scaling=scaling), model(TOKENS))


@pytest.mark.parametrize(
    ("more", "name", "value"),
    [
        ({"model_type": "mistral"}, "window", 4096),
        ({"model_type": "mistral", "sliding_window": None}, "window", None),
        ({"model_type": "qwen3", "sliding_window": 4}, "window", None),
        ({**QWEN_WINDOW, "max_window_layers": L}, "window", None),
        ({**QWEN_WINDOW, "max_window_layers": 0}, "window", 4),
        ({**QWEN_WINDOW, "layer_types": ["sliding_attention"] * L}, "window", 4),
        ({"rope_scaling": YARN}, "rope_scaling", YARN | {"original_max_position_embeddings": 64}),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 16}},
            "rope_scaling",
            YARN | {"original_max_position_embeddings": 16},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling", {"type": "linear", "factor": 2.0}),
        ({"partial_rotary_factor": 1.0}, "rope_scaling", None),
    ],
)  # fmt: skip
def test_keys_that_a_config_leaves_out(more: dict[str, Any], name: str, value: Any) -> None:
    config = layers.LlamaConfig.from_hugging_face(HF | {"max_position_embeddings": 64} | more)
    assert getattr(config, name) == value
    built(config)


def test_heads_of_qwen3() -> None:
    without = {key: value for key, value in HF.items() if key != "head_dim"}
    made = layers.LlamaConfig.from_hugging_face(without | {"model_type": "qwen3"})
    assert made.head_size == 128
    assert layers.LlamaConfig.from_hugging_face(without).head_size == N // H


@pytest.mark.parametrize(
    ("more", "made"),
    [
        ({"attention_bias": True, "mlp_bias": True}, {"bias": True}),
        (
            {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 4},
            {"qk_norm": True},
        ),
        ({"model_type": "mistral", "sliding_window": 4}, {}),
        (
            {
                "rope_scaling": None,
                "rope_parameters": SCALING | {"rope_theta": 500000.0},
                "rope_theta": None,
            },
            {},
        ),
    ],
)
def test_variants_of_configs(more: dict[str, Any], made: dict[str, Any]) -> None:
    state = checkpoint("hugging_face", **made)
    model = built(layers.LlamaConfig.from_hugging_face(HF | more))
    model.load_state_dict(layers.from_llama(model, state))
    window = 4 if more.get("model_type") == "mistral" else None
    scaling = SCALING if "rope_parameters" in more else None
    want = logits(state, "hugging_face", window=window, scaling=scaling)
    torch.testing.assert_close(model(TOKENS), want)


def test_sizes_that_meta_derives() -> None:
    """Llama 3 8B and Llama 2 7B, whose MLPs have 14336 and 11008 features."""
    eight = {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "multiple_of": 1024,
        "ffn_dim_multiplier": 1.3,
    }
    seven = {"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 256}
    for params, ffn in ((eight, 14336), (seven, 11008)):
        config = layers.LlamaConfig.from_meta(params, vocab_size=32000, tied=False)
        assert config.ffn_hidden_size == ffn
        assert config.head_size == 128


def test_generation_of_a_loaded_model() -> None:
    state = checkpoint("hugging_face")
    model = built(layers.LlamaConfig.from_hugging_face(HF | {"rope_scaling": SCALING})).eval()
    model.load_state_dict(layers.from_llama(model, state))
    for layer in model["layers"]:
        layer.self_attention.attention.cache = te.KVCache(2, 11, HK, D, dtype=F64)
    with torch.no_grad():
        parts = [model(part) for part in TOKENS.split([4, *[1] * 7], 1)]
    want = logits(state, "hugging_face", scaling=SCALING)
    torch.testing.assert_close(torch.cat(parts, 1), want)


# -- folders


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("kind", ["safetensors", "sharded safetensors", "bin", "sharded bin"])
def test_folders_of_hugging_face(kind: str, tmp_path: Path) -> None:
    state = checkpoint("hugging_face", tied=True)
    write_json(
        tmp_path / "config.json", HF | {"tie_word_embeddings": True, "rope_scaling": SCALING}
    )
    binary = kind.endswith("bin")
    stem, suffix = ("pytorch_model", "bin") if binary else ("model", "safetensors")
    names = sorted(state)
    shards = [names[::3], names[1::3], names[2::3]] if "sharded" in kind else [names]
    where = {}
    for i, part in enumerate(shards):
        file = (
            f"{stem}-{i + 1:05}-of-{len(shards):05}.{suffix}"
            if len(shards) > 1
            else f"{stem}.{suffix}"
        )
        held = {name: state[name] for name in part}
        torch.save(held, tmp_path / file) if binary else save_file(held, tmp_path / file)
        where |= dict.fromkeys(part, file)
    if len(shards) > 1:
        write_json(tmp_path / f"{stem}.{suffix}.index.json", {"metadata": {}, "weight_map": where})
    model = layers.load_llama(tmp_path)
    assert {p.dtype for p in model.parameters()} == {F64}
    assert model["head"].weight is model["embedding"].weight
    torch.testing.assert_close(model(TOKENS), logits(state, "hugging_face", scaling=SCALING))
    low = layers.load_llama(tmp_path, dtype=torch.bfloat16, attn_input_format="sbhd")
    assert low(TOKENS.t()).dtype is torch.bfloat16
    if len(shards) > 1:
        (tmp_path / file).unlink()
        with pytest.raises(Error, match=f"names files that are not there: .*{file}"):
            layers.load_llama(tmp_path)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("files", [1, 2])
def test_folders_of_meta(rows: bool, files: int, tmp_path: Path) -> None:
    """Model-parallel files slice rows or columns; the embedding's rows in later models, its columns in earlier ones."""
    state = checkpoint("meta")
    write_json(tmp_path / "params.json", META | {"use_scaled_rope": True})
    cuts = {
        "wo": 1,
        "w2": 1,
        "tok_embeddings": 0 if rows else 1,
        "norm": None,
        "attention_norm": None,
        "ffn_norm": None,
    }
    for i in range(files):
        part = {"rope.freqs": torch.zeros(4)}
        for name, x in state.items():
            axis = cuts.get(name.split(".")[-2], 0)
            part[name] = x if axis is None else x.chunk(files, axis)[i].clone()
        torch.save(part, tmp_path / f"consolidated.{i:02}.pth")
    model = layers.load_llama(tmp_path)
    torch.testing.assert_close(model(TOKENS), logits(state, "meta", scaling=SCALING))


def test_a_folder_of_meta_without_an_output_is_tied(tmp_path: Path) -> None:
    state = checkpoint("meta", tied=True)
    write_json(tmp_path / "params.json", META)
    save_file(state, tmp_path / "consolidated.safetensors")
    model = layers.load_llama(tmp_path)
    assert model["head"].weight is model["embedding"].weight
    torch.testing.assert_close(model(TOKENS), logits(state, "meta"))
    assert "output.weight" in layers.to_llama(model, naming="meta")


# -- mistakes


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model_type": "gemma2"}, "model_type must be one of llama, mistral, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"attention_bias": True}, "attention_bias and mlp_bias differ"),
        (
            {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
            "with and without",
        ),
        ({**QWEN_WINDOW, "max_window_layers": 1}, "with and without"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"rope_scaling": YARN}, "'yarn' lacks original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "odd"}}, "rope_type must be one of"),
        ({"head_dim": None, "num_attention_heads": 3}, "give kv_channels"),
    ],
)
def test_configs_that_do_not_fit(more: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        built(layers.LlamaConfig.from_hugging_face(HF | more))


def test_a_config_without_sizes() -> None:
    with pytest.raises(PlanError, match="it has no hidden_size, num_hidden_layers"):
        layers.LlamaConfig.from_hugging_face(
            {k: v for k, v in HF.items() if k not in ("hidden_size", "num_hidden_layers")}
        )


def test_state_dicts_that_do_not_fit() -> None:
    config = layers.LlamaConfig.from_hugging_face(HF)
    model, state = built(config), checkpoint("hugging_face")
    without = {name: x for name, x in state.items() if name != "lm_head.weight"}
    with pytest.raises(PlanError, match=r"has no lm_head\.weight; make the model with tied=True"):
        layers.from_llama(model, without)
    with pytest.raises(PlanError, match=r"has also model\.layers\.3\.more"):
        layers.from_llama(model, {**state, "model.layers.3.more": torch.zeros(1)})
    with pytest.raises(PlanError, match=r"has also .*w1"):
        layers.from_llama(model, {**state, "model.layers.0.mlp.w1.weight": torch.zeros(1)})
    tied = built(layers.LlamaConfig.from_hugging_face(HF | {"tie_word_embeddings": True}))
    with pytest.raises(PlanError, match="make the model with tied=False"):
        layers.from_llama(tied, state)
    same = state | {"lm_head.weight": state["model.embed_tokens.weight"]}
    tied.load_state_dict(layers.from_llama(tied, same))
    with pytest.raises(PlanError, match=r"this one has 0"):
        layers.to_llama(te.Sequential(te.Linear(2, 2)))


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"neither config\.json nor params\.json"):
        layers.load_llama(tmp_path)
    write_json(tmp_path / "params.json", META)
    with pytest.raises(Error, match="has no consolidated"):
        layers.load_llama(tmp_path)
    (tmp_path / "consolidated.00.pth").write_bytes(b"nothing")
    with pytest.raises(Error, match="cannot be read"):
        layers.load_llama(tmp_path)
    write_json(tmp_path / "config.json", HF)
    with pytest.raises(Error, match=r"has none of model\.safetensors\.index\.json"):
        layers.load_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(Error, match="cannot be read"):
        layers.load_llama(tmp_path)
