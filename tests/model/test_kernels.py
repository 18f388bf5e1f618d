"""Compiled kernels against plain tensor operations, on random inputs, in every dtype both support."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from milepost.errors import ModelError
from milepost.model.config import (
    GATE_FIRST,
    NO_NORM,
    NORM_FIRST,
    RELU2,
    SIGMOID,
    SILU,
    AttentionSpec,
    GatedDeltaSpec,
    IndexSpec,
    LatentSpec,
    MoeSpec,
    ScanSpec,
    StreamsSpec,
)
from milepost.model.kernels import TorchKernels, choose_kernels
from milepost.model.kernels.compiled import NumbaKernels
from milepost.model.linear import Linear
from milepost.model.work import DecodeRows, DecodeWork

BOTH = (torch.float32, torch.bfloat16)
EPS = 1e-6
NORMS = ("q_norm", "k_norm")
# Of weights and states, as they are served. Each pair, like each shape, is compiled when first met.
PAIRS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.fixture(scope="module")
def compiled():
    return NumbaKernels()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(a, b, dtype):
    """Equal up to the last bit or so of `dtype`; both must be finite and not all alike."""
    assert a.dtype == b.dtype
    assert torch.isfinite(b.float()).all()
    assert b.float().std() > 0
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


def delta_layer(key_heads, value_heads, kernel, value_dim=24, **kind):
    spec = GatedDeltaSpec(key_heads, value_heads, key_dim=16, value_dim=value_dim, kernel=kernel, **kind)
    return SimpleNamespace(
        spec=spec,
        eps=EPS,
        conv_weight=torch.randn(kernel, spec.channels) * 0.5,
        conv_bias=torch.randn(spec.channels) * 0.5,
        rate=torch.rand(value_heads) + 0.2,
        dt_bias=torch.randn(spec.gates),
        norm=(1 + 0.2 * torch.randn(value_dim)).repeat(value_heads),
    )


def scan_layer(kernel, timed, **kind):
    """Eight value heads in two groups."""
    spec = ScanSpec(2, 8, key_dim=24, value_dim=16, kernel=kernel, timed=timed, step_floor=0.1, norm_groups=2, **kind)
    return SimpleNamespace(
        spec=spec,
        eps=EPS,
        conv_weight=torch.randn(kernel, spec.channels) * 0.5,
        conv_bias=torch.randn(spec.channels) * 0.5,
        rate=torch.rand(8) + 0.2,
        dt_bias=torch.randn(8),
        skip=torch.randn(8),
        norm=1 + 0.2 * torch.randn(spec.value_width),
    )


def decode_rows(lengths, rows, rotary_dim=8):
    ids = np.random.default_rng(1).permutation(np.arange(1, rows + 1))[: sum(lengths)].astype(np.int32)
    angles = torch.randn(len(lengths), rotary_dim // 2)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    return DecodeRows(ids, offsets, angles.cos(), angles.sin())


def decode_work(slots):
    return DecodeWork(np.array(slots, np.int64))


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("tokens", [1, 7])
def test_add_norm(compiled, dtype, tokens):
    stream, delta = (torch.randn(tokens, 50).to(dtype) for _ in range(2))
    weight = torch.randn(50)
    other = stream.clone()
    close(compiled.add_norm(stream, delta, weight, EPS), TorchKernels().add_norm(other, delta, weight, EPS), dtype)
    assert torch.equal(stream, other)


@pytest.mark.parametrize("dtype", BOTH)
def test_silu_mul(compiled, dtype):
    x = (torch.randn(5, 64) * 4).to(dtype)
    x[0, 0], x[1, 0] = 200.0, -200.0  # the exponential saturates and does not overflow
    close(compiled.silu_mul(x), TorchKernels().silu_mul(x), dtype)


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "kernel", "dtype", "state_dtype"),
    [(2, 4, 4, a, b) for a, b in PAIRS] + [(3, 3, 2, torch.float32, torch.float32)],
)
def test_delta_step(compiled, dtype, state_dtype, key_heads, value_heads, kernel):
    layer = delta_layer(key_heads, value_heads, kernel)
    spec = layer.spec
    work = decode_work([3, 8, 1, 6, 2])
    projected = torch.randn(5, spec.channels + spec.value_width + 2 * value_heads).to(dtype)
    conv = torch.randn(9, kernel - 1, spec.channels).to(dtype)
    temporal = torch.randn(9, value_heads, 16, 24).to(state_dtype)
    conv2, temporal2, before = conv.clone(), temporal.clone(), temporal.clone()
    for _ in range(3):
        out = compiled.delta_step(layer, projected, work, conv, temporal)
        out2 = TorchKernels().delta_step(layer, projected, work, conv2, temporal2)
        close(out, out2, torch.float32 if state_dtype == torch.float32 else torch.bfloat16)
    close(temporal, temporal2, state_dtype)
    assert torch.equal(conv, conv2)
    untouched = [0, 4, 5, 7]
    assert torch.equal(temporal[untouched], before[untouched])
    assert not torch.equal(temporal[3], before[3])


@pytest.mark.parametrize(
    "kind",
    [
        {"channel_gates": True, "gate": SIGMOID},
        {"channel_gates": True, "gate": SIGMOID, "bound": -5.0},
        {"beta_scale": 2.0},
    ],
)
def test_delta_step_of_other_kinds(compiled, kind):
    dtype = torch.float32
    layer = delta_layer(4, 4, 4, value_dim=16, **kind) if "channel_gates" in kind else delta_layer(2, 4, 4, **kind)
    work = decode_work([3, 1, 2])
    projected = torch.randn(3, layer.spec.channels + layer.spec.value_width + 4 + layer.spec.gates).to(dtype)
    conv, temporal = torch.randn(5, 3, layer.spec.channels).to(dtype), torch.randn(5, *layer.spec.state.temporal)
    conv2, temporal2 = conv.clone(), temporal.clone()
    out = compiled.delta_step(layer, projected, work, conv, temporal)
    out2 = TorchKernels().delta_step(layer, projected, work, conv2, temporal2)
    close(out, out2, dtype)
    close(temporal, temporal2, torch.float32)
    assert torch.equal(conv, conv2)


# Mamba-2's shape with groups, and Lightning's without a convolution; several pairs of dtypes for the first.
@pytest.mark.parametrize(
    ("kernel", "timed", "dtype", "state_dtype"),
    [(4, True, a, b) for a, b in PAIRS] + [(1, False, torch.float32, torch.float32)],
)
def test_scan_step(compiled, kernel, timed, dtype, state_dtype):
    layer = scan_layer(kernel, timed)
    spec = layer.spec
    work = decode_work([3, 8, 1, 6])
    projected = torch.randn(4, spec.channels + spec.value_width + 8 * timed).to(dtype)
    conv = torch.randn(9, spec.state.taps, spec.state.channels).to(dtype)
    temporal = torch.randn(9, 8, 24, 16).to(state_dtype)
    conv2, temporal2, before = conv.clone(), temporal.clone(), temporal.clone()
    for _ in range(3):
        out = compiled.scan_step(layer, projected, work, conv, temporal)
        out2 = TorchKernels().scan_step(layer, projected, work, conv2, temporal2)
        close(out, out2, torch.float32 if state_dtype == torch.float32 else torch.bfloat16)
    close(temporal, temporal2, state_dtype)
    assert torch.equal(conv, conv2)
    assert torch.equal(temporal[[0, 2, 4, 5, 7]], before[[0, 2, 4, 5, 7]])


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("norm", "gate"), [(GATE_FIRST, SILU), (NORM_FIRST, SIGMOID), (NO_NORM, SILU)])
def test_finish(compiled, dtype, norm, gate):
    layer = scan_layer(4, True, norm=norm, gate=gate)
    spec = layer.spec
    o, place = torch.randn(2, 8, 5, 16), torch.randperm(10)[:7]
    projected = torch.randn(7, spec.channels + spec.value_width + 8).to(dtype)
    out, out2 = (torch.zeros(7, spec.value_width, dtype=dtype) for _ in range(2))
    compiled.finish(layer, o, place, projected, out)
    TorchKernels().finish(layer, o, place, projected, out2)
    close(out, out2, dtype)


@pytest.mark.parametrize("dtype", BOTH)
def test_conv_step(compiled, dtype):
    projected, weight = torch.randn(3, 60).to(dtype), torch.randn(3, 20)
    work = decode_work([3, 1, 4])
    conv = torch.randn(6, 2, 20).to(dtype)
    conv2 = conv.clone()
    for _ in range(3):
        out, out2 = (torch.zeros(3, 20, dtype=dtype) for _ in range(2))
        compiled.conv_step(projected, weight, work, conv, out)
        TorchKernels().conv_step(projected, weight, work, conv2, out2)
        close(out, out2, dtype)
    assert torch.equal(conv, conv2)


@pytest.mark.parametrize("dtype", BOTH)
def test_gated_conv(compiled, dtype):
    projected, ext, weight = torch.randn(9, 60).to(dtype), torch.randn(14, 20).to(dtype), torch.randn(3, 20)
    places = torch.tensor([0, 1, 2, 3, 4, 7, 8, 9, 11])
    out, out2 = (torch.zeros(9, 20, dtype=dtype) for _ in range(2))
    compiled.gated_conv(projected, ext, places, weight, out)
    TorchKernels().gated_conv(projected, ext, places, weight, out2)
    close(out, out2, dtype)


@pytest.mark.parametrize(("heads", "kv_dtype"), [(4, torch.float32), (4, torch.bfloat16), (3, torch.float32)])
def test_latent_step(compiled, kv_dtype, heads):
    spec = LatentSpec(heads, 32, 8, 16, 16, 0, 0, 1.0, False)
    seen = decode_rows([1, 70, 13, 2], 120)
    query = torch.randn(4, heads, 40) * 0.3
    keys = torch.randn(121, 40).to(kv_dtype)
    keys[0] = 0
    close(
        compiled.latent_step(spec, query, seen, keys),
        TorchKernels().latent_step(spec, query, seen, keys),
        torch.float32,
    )


@pytest.mark.parametrize("dtype", BOTH)
def test_pool(compiled, dtype):
    tokens, place = torch.randn(5, 4, 48).to(dtype), torch.randn(4, 24)
    tokens[1, 2, 30] = 90.0  # one token takes all
    got = compiled.pool(tokens, place)
    close(got, TorchKernels().pool(tokens, place), dtype)
    assert got[1, 6] == tokens[1, 2, 6]


@pytest.mark.parametrize("dtype", BOTH)
def test_choose_rows(compiled, dtype):
    """Scores and choice written out for one sequence at a time; every third group is a copy, so there are ties."""
    spec = IndexSpec(heads=2, dim=16, group=4, kept=5)
    work = decode_rows([3, 20, 70, 23, 41], 160)
    query, weights = torch.randn(5, 2, 16), torch.randn(5, 2)
    values = torch.randn(161, 32).to(dtype)
    expected = []
    for n in range(5):
        own = work.rows[work.offsets[n] : work.offsets[n + 1]]
        ends = own[3::4]
        values[ends[2::3]] = values[ends[1::3][: len(ends[2::3])]]
        keys = values[ends, :16].float()
        scores = [
            float(sum(w * max(float(q @ key), 0) for q, w in zip(query[n], weights[n], strict=True))) for key in keys
        ]
        chosen = sorted(sorted(range(len(scores)), key=lambda g: (-scores[g], g))[:5])
        expected.append([*(row for g in chosen for row in own[4 * g : 4 * g + 4]), *own[len(own) // 4 * 4 :]])
    for kernels in (compiled, TorchKernels()):
        got = kernels.choose_rows(spec, query, weights, work, values)
        assert got.rows.dtype == np.int32
        assert [part.tolist() for part in np.split(got.rows, got.offsets[1:-1])] == expected


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("count", "rounds"), [(3, 1), (4, 20)])
def test_streams(compiled, dtype, count, rounds):
    spec = StreamsSpec(count, rounds, eps=1e-6)
    streams, y = torch.randn(5, count, 40).to(dtype), torch.randn(5, 40).to(dtype)
    made, norm = torch.randn(5, count * (count + 2)), 1 + 0.2 * torch.randn(40)
    other = streams.clone()
    ours, theirs = (k.read_streams(spec, streams, made, norm, EPS) for k in (compiled, TorchKernels()))
    for a, b, kind in zip(ours, theirs, (dtype, torch.float32, torch.float32), strict=True):
        close(a, b, kind)
    compiled.write_streams(streams, y, *ours[1:])
    TorchKernels().write_streams(other, y, *theirs[1:])
    close(streams, other, dtype)
    between = theirs[2]
    assert torch.allclose(between.sum(1), torch.ones(()), atol=1e-4)  # columns are scaled last
    assert rounds == 1 or torch.allclose(between.sum(2), torch.ones(()), atol=1e-3)


@pytest.mark.parametrize("kind", [{"gated": False}, {"normed": False, "gated": False, "rotary_dim": 0}])
def test_attention_step_of_other_kinds(compiled, kind):
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "rotary_dim": 8, "rope_theta": 1e4}
    spec = AttentionSpec(**{**sizes, **kind})
    norms = {"q_norm": 1 + torch.randn(16), "k_norm": 1 + torch.randn(16)} if spec.normed else dict.fromkeys(NORMS)
    layer = SimpleNamespace(spec=spec, eps=EPS, **norms)
    seen = decode_rows([1, 70, 13], 120, rotary_dim=spec.rotary_dim)
    projected = torch.randn(3, 8 * 16)
    keys, values = (torch.randn(121, 2, 16) for _ in range(2))
    keys2, values2 = keys.clone(), values.clone()
    out, out2 = torch.zeros(3, 64), torch.zeros(3, 64)
    compiled.attention_step(layer, projected, seen, keys, values, out)
    TorchKernels().attention_step(layer, projected, seen, keys2, values2, out2)
    close(out, out2, torch.float32)
    close(keys, keys2, torch.float32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "kv_dtype"),
    [(4, 2, a, a) for a in BOTH] + [(8, 1, *BOTH)],
)
def test_attention_step(compiled, dtype, kv_dtype, heads, kv_heads):
    spec = AttentionSpec(heads, kv_heads, head_dim=32, rotary_dim=8, rope_theta=1e4)
    layer = SimpleNamespace(spec=spec, eps=EPS, q_norm=1 + torch.randn(32), k_norm=1 + torch.randn(32))
    seen = decode_rows([1, 70, 13, 2], 120)
    projected = torch.randn(4, (2 * heads + 2 * kv_heads) * 32).to(dtype)
    keys, values = (torch.randn(121, kv_heads, 32).to(kv_dtype) for _ in range(2))
    keys[0], values[0] = torch.nan, torch.nan  # the dummy row is never looked at by the compiled kernel
    keys2, values2 = keys.nan_to_num(0), values.nan_to_num(0)
    out = torch.zeros(4, heads * 32, dtype=dtype)
    out2 = out.clone()
    compiled.attention_step(layer, projected, seen, keys, values, out)
    TorchKernels().attention_step(layer, projected, seen, keys2, values2, out2)
    close(out, out2, torch.bfloat16 if torch.bfloat16 in (dtype, kv_dtype) else dtype)
    close(keys[1:], keys2[1:], kv_dtype)
    assert torch.equal(values[1:], values2[1:])


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("key_heads", "value_heads", "kernel"), [(2, 4, 4), (3, 3, 3)])
def test_prefill_kernels(compiled, dtype, key_heads, value_heads, kernel):
    layer = delta_layer(key_heads, value_heads, kernel)
    spec, plain = layer.spec, TorchKernels()
    ext = torch.randn(60, spec.channels).to(dtype)
    chunks = torch.randint(0, 60 - kernel + 1, (4, 16))
    ours, theirs = compiled.convolve(layer, ext, chunks), plain.convolve(layer, ext, chunks)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b.contiguous(), torch.float32)
    beta, decay = torch.rand(4, value_heads, 16), -3 * torch.rand(4, value_heads, 16)
    beta[3, :, 10:], decay[3, :, 10:] = 0, 0
    a, b = compiled.chunk_terms(*ours, beta, decay), plain.chunk_terms(*theirs, beta, decay)
    for name in ("values", "corrections", "queries", "keys", "scores", "decays"):
        close(getattr(a, name), getattr(b, name), torch.float32)
    x = torch.randn(4, value_heads, 16, 24)
    place = torch.randperm(64)[:50]
    projected = torch.randn(50, spec.channels + spec.value_width + 2 * value_heads).to(dtype)
    out, out2 = (torch.zeros(50, spec.value_width, dtype=dtype) for _ in range(2))
    compiled.finish(layer, x, place, projected, out)
    plain.finish(layer, x, place, projected, out2)
    close(out, out2, dtype)


@pytest.mark.parametrize("form", ["chunk_terms", "channel_terms", "scan_terms"])
@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_chunk_forms_equal_their_recurrences(compiled, kernels, form):
    """The matrix forms against the laws they were derived from, step by step in float64."""
    q, k = (torch.nn.functional.normalize(torch.randn(1, 1, 64, 8), dim=-1) for _ in range(2))
    v, beta = torch.randn(1, 1, 64, 8), torch.rand(1, 1, 64)
    # Decays down to e^-400 over a chunk: factored into two exponentials they would overflow.
    decay = -12 * torch.rand(1, 1, 64, 8) ** 4 if form == "channel_terms" else -torch.rand(1, 1, 64)
    k[0, 0, 20:40] = k[0, 0, 20]  # the same key again and again: the system is then at its worst
    initial = torch.randn(8, 8)
    terms = getattr(compiled if kernels == "compiled" else TorchKernels(), form)(q, k, v, beta, decay)
    d = terms.values[0, 0] if form == "scan_terms" else terms.values[0, 0] - terms.corrections[0, 0] @ initial
    o = terms.queries[0, 0] @ initial + terms.scores[0, 0] @ d
    state = terms.decays[0, 0][:, None] * initial + terms.keys[0, 0].T @ d
    s = initial.double()
    q, k, v, beta, decay = (t[0, 0].double() for t in (q, k, v, beta, decay))
    for t in range(64):
        s = decay[t].exp().view(-1, 1) * s
        read = 0 if form == "scan_terms" else s.T @ k[t]
        s = s + torch.outer(k[t], beta[t] * (v[t] - read))
        torch.testing.assert_close(o[t].double(), s.T @ q[t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), s, rtol=1e-4, atol=1e-5)


def expert_layer(dtype=torch.float32, activation=SILU, limit=None, **spec):
    """Seven experts on an inner width of 40."""
    spec = MoeSpec(**{"experts": 7, "per_token": 3, "width": 24, "shared_width": 0, "normalize": True, **spec})
    rows = spec.width * (1 if activation == RELU2 else 2)
    up, down = torch.randn(spec.experts, rows, 40), torch.randn(spec.experts, 40, spec.width)
    bias = torch.randn(spec.experts) * 0.2 if spec.biased else torch.zeros(spec.experts)
    return SimpleNamespace(
        spec=spec, bias=bias, up=(up / 6).to(dtype), down=(down / 5).to(dtype), activation=activation, limit=limit
    )


@pytest.mark.parametrize(
    "spec",
    [
        {"scale": 1.5},
        {"scoring": "sigmoid", "biased": True, "epsilon": 1e-6, "normalize": False},
        {"experts": 12, "scoring": "sigmoid", "biased": True, "groups": 4, "groups_kept": 2, "epsilon": 1e-3},
    ],
)
@pytest.mark.parametrize("dtype", BOTH)
def test_route(compiled, dtype, spec):
    layer = expert_layer(**spec)
    logits = torch.randn(50, layer.spec.experts).to(dtype)
    logits += 0.01 * torch.arange(layer.spec.experts)  # equal ones may be ranked either way
    (chosen, weights), (chosen2, weights2) = (k.route(layer, logits) for k in (compiled, TorchKernels()))
    assert torch.equal(chosen, chosen2)
    close(weights, weights2, torch.float32)


@pytest.mark.parametrize(("activation", "limit"), [(SILU, None), (RELU2, None), (SILU, 0.4)])
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("tokens", [1, 9, 60])
def test_experts(compiled, dtype, tokens, activation, limit):
    """60 tokens are too many for the compiled loops: then each expert's product is torch's, and the sum compiled."""
    layer = expert_layer(dtype, activation, limit, width=23)
    x = torch.randn(tokens, 40).to(dtype)
    chosen, weights = TorchKernels().route(layer, torch.randn(tokens, 7))
    y = compiled.experts(layer, x, chosen, weights, None)
    close(y, TorchKernels().experts(layer, x, chosen, weights, None), dtype)
    expected = torch.zeros(tokens, 40)
    for t in range(tokens):
        for e, weight in zip(chosen[t], weights[t], strict=True):
            raw = layer.up[e].float() @ x[t].float()
            gate, up = raw[:23], raw[-23:]
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = gate.relu() ** 2 if activation == RELU2 else gate * gate.sigmoid() * up
            expected[t] += weight * (layer.down[e].float() @ h)
    close(y, expected.to(dtype), dtype)


@pytest.mark.parametrize("dtype", BOTH)
def test_an_experts_result_does_not_depend_on_who_shares_it(compiled, dtype):
    layer = expert_layer(dtype)
    x = torch.randn(12, 40).to(dtype)
    chosen, weights = compiled.route(layer, torch.randn(12, 7))
    together = compiled.experts(layer, x, chosen, weights, None)
    for some in ([3], [0, 5], [11, 2, 7], [1, 2, 3, 4, 5], list(range(11, -1, -1))):
        alone = compiled.experts(layer, x[some], chosen[some], weights[some], None)
        assert torch.equal(alone, together[some])


@pytest.mark.parametrize("keep_layout", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", BOTH)
def test_linear_is_the_product(dtype, rows, keep_layout):
    weight, x = torch.randn(33, 20).to(dtype), torch.randn(rows, 50).to(dtype)[:, 7:27]
    close(Linear(weight, keep_layout=keep_layout)(x), (x.double() @ weight.double().T).to(dtype), dtype)


def test_choice_of_kernels():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert isinstance(choose_kernels("auto", cpu, torch.bfloat16), NumbaKernels)
    for kernels in (
        choose_kernels("auto", cuda, torch.bfloat16),
        choose_kernels("auto", cpu, torch.float16),
        choose_kernels("torch", cpu, torch.float32),
    ):
        assert type(kernels) is TorchKernels
    with pytest.raises(ModelError, match="numba"):
        choose_kernels("numba", cuda, torch.bfloat16)
    with pytest.raises(ModelError, match="fast"):
        choose_kernels("fast", cpu, torch.float32)


def test_threads_stay_as_torch_has_them():
    before = torch.get_num_threads()
    NumbaKernels().silu_mul(torch.randn(4, 8))
    assert torch.get_num_threads() == before
