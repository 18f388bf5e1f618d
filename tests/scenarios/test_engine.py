"""The scenarios about texts, logits and bytes, on the embedded model in float32.

Lengths are the scenarios' own where the model is fast enough, else scaled down together; the figures at full length
are those of the other files, for the engine runs the same scheduler.
"""

from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

import milepost  # noqa: E402
from milepost.engine.executor import TorchExecutor  # noqa: E402
from milepost.model import Memory, load_decoder, load_model_config  # noqa: E402
from milepost.model.config import DENSE, GATED_DELTA, GatedDeltaSpec, LayerSpec  # noqa: E402
from tests.scenarios.world import BOTH, Stream, World, either, figures  # noqa: E402

DEMO = Path(milepost.__file__).parent / "demo"
VOCABULARY = 4096
A, B, D, H, X, Y = (Stream(name, VOCABULARY) for name in "ABDHXY")


@cache
def decoder():
    return load_decoder(DEMO, dtype=torch.float32)


class Listening:
    """A decoder whose logits are kept on their way."""

    def __init__(self) -> None:
        self.logits = None

    def forward(self, *args, **kwargs):
        self.logits = decoder().forward(*args, **kwargs)
        return self.logits


class ModelWorld(World):
    """A world that computes: one text for each request, and the logits behind each of its tokens."""

    def make_executor(self, slots):
        page = self.strategy.page
        self.memory = Memory(decoder().config, slots, self.rows + page - 1, kv_dtype=torch.float32)
        self.ears = Listening()
        self.logits = {}
        return TorchExecutor(self.ears, self.memory, strict=self.strategy.prefilled_only)

    def tick(self, count=1, span=1):  # noqa: ARG002
        for _ in range(count):
            plan = super().tick()
            sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
            for number, row in zip(sampling, self.ears.logits if sampling else [], strict=True):
                self.logits.setdefault(number, []).append(row.clone())
        return plan

    def check_text(self, number, text):
        """What the text has to be is the test's to say."""

    def ask_with_logits(self, prompt, gen):
        number = self.start(prompt, gen)
        self.drain()
        return self.answer(number), torch.stack(self.logits[number])

    def state_bytes(self, path, at):
        """The checkpoint at a position of a path: windows and recurrent states of all layers."""
        (slot,) = [node.state.device for node in self._holders(path) if node.end == at]
        return self.memory.conv[:, slot].clone(), self.memory.temporal[:, slot].clone()


@pytest.fixture(autouse=True)
def one_thread():
    """These models are small: a second thread only adds noise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(world):
    def make(strategy="exact", **more):
        return world(strategy, kind=ModelWorld, **{"rows": 16_384, "slots": 16, **more})

    return make


@lru_cache(maxsize=4)
def cold(prompt: tuple[int, ...], gen: int, chunk: int = 2048, strict: bool = False):
    """Text and logits of a prompt on a server of its own, without a cache."""
    off = {"strict_reuse": True} if strict else {"disable_radix_cache": True}
    strategy = "exact" if strict else None
    w = ModelWorld(strategy, rows=8192, slots=4, chunk=chunk, **off)
    answer, logits = w.ask_with_logits(list(prompt), gen)
    assert answer.resume == 0
    return answer.text, logits


def close(a, b) -> bool:
    return torch.allclose(torch.log_softmax(a, -1), torch.log_softmax(b, -1), atol=2e-4, rtol=0)


@BOTH
def test_s04_text_equals_cold_without_a_state(model, strategy):
    """A quarter of the scenario: KV is there to 1024, no state is; resuming on an empty or foreign one would show."""
    w = model(strategy, slots=6)
    first = w.ask(A * 1024, 16)
    w.drop_states(first.context)
    prompt = A * 1024 + B * 100
    answer, logits = w.ask_with_logits(prompt, 16)
    text, expected = cold(tuple(prompt), 16)
    assert (answer.resume, answer.reuse.kv_depth, answer.text) == (0, 1024, text)
    assert close(logits, expected)
    assert w.ask(A * 1024 + D * 100).resume == 1024


@pytest.mark.parametrize(("strategy", "page", "resume"), [("exact", 1, 5007), ("extra_buffer", 512, 4608)])
def test_s05_log_probabilities_after_the_resume_point(model, strategy, page, resume):
    """A state resumed at its own depth continues as a cold run does."""
    w = model(strategy, level=3, chunk=4096, page_size=page, mamba_track_interval=512)
    w.ask(A * 5007)
    prompt = A * 5007 + B * 50
    answer, logits = w.ask_with_logits(prompt, 4)
    text, expected = cold(tuple(prompt), 4, 4096)
    assert (answer.resume, answer.text) == (resume, text)
    assert close(logits, expected)


@BOTH
def test_s37_states_are_copied_after_their_step(model, strategy):
    """Eight chunk ends, each byte-equal in another run and to the state of a prompt that ends there.

    A quarter of the scenario's lengths. Delays wait for overlap: today a step is run to its end before the next.
    """
    first, second = (model(strategy, level=3, chunk=128) for _ in range(2))
    for w in (first, second):
        w.ask(A * 1024)
        assert w.unmarked() == [128 * i for i in range(1, 9)]
    for position in range(128, 1025, 128):
        alone = model(strategy, level=3, chunk=128, rows=2048, slots=16)
        alone.ask(A * position)
        states = [w.state_bytes(A * position, position) for w in (first, second, alone)]
        assert all(torch.equal(*pair) for other in states[1:] for pair in zip(states[0], other, strict=True))


@figures(exact=500, extra_buffer=448)
def test_s38_prefill_mixed_with_decodes(model, strategy, expected):
    """While eight others decode, texts equal those with the cache off and nobody else there. A tenth of the lengths."""
    w = model(strategy, slots=either(strategy, 32, 64))
    for i in range(8):
        w.start(X(i) * 20, 400)
    w.tick()
    found = []
    for other in (B, Y(1), Y(2), Y(3)):
        prompt = A * 500 + other * 100
        number = w.start(prompt, 8)
        while number not in w.ends:
            w.tick()
        assert w.stats.running == 8
        found.append(w.answer(number).resume)
        text, logits = cold(tuple(prompt), 8)
        assert w.texts[number] == text and close(torch.stack(w.logits[number]), logits)
    for running in w.scheduler.running():
        w.cancel(running.number)
    assert found == [0, 0, expected, expected]


@figures(exact=1, extra_buffer=2)
def test_s47_texts_survive_retraction(model, strategy, expected):
    """A tenth of the scenario: the same number of retractions, and four texts as on a large pool."""
    texts = []
    for rows in (600, 16_384):
        w = model(strategy, rows=rows, slots=either(strategy, 12, 20))
        numbers = [w.start(X(i) * 100, 100) for i in range(4)]
        w.drain()
        assert w.counters.preempted_total == (expected if rows == 600 else 0)
        texts.append([w.texts[number] for number in numbers])
    assert texts[0] == texts[1] and all(len(text) == 100 for text in texts[0])


def test_s52_slots_beyond_four_gib(monkeypatch):
    """Patterns in slots of 3 MiB each come back, though a wrapped slot 1400 would hit slots 34 and 35.

    Memory is reserved but only touched where a pattern lies.
    """
    spec = GatedDeltaSpec(1, 48, 128, 128, 4)  # 48 heads of 128 x 128 float32
    config = replace(load_model_config(DEMO), linear=spec, layers=(LayerSpec(GATED_DELTA, DENSE),))
    kinds = {torch.float32: np.float32}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lambda shape, dtype, **_: torch.from_numpy(np.zeros(shape, kinds[dtype])))
        memory = Memory(config, 1401, 64, kv_dtype=torch.float32)
    assert memory.temporal[0, 0].nbytes == 3 * 2**20
    slots = (34, 35, 682, 683, 1365, 1366, 1400)
    for slot in slots:
        memory.temporal[:, slot] = slot
        memory.conv[:, slot] = -slot
    for slot in slots:
        assert bool((memory.temporal[:, slot] == slot).all()) and bool((memory.conv[:, slot] == -slot).all())
    memory.copy_slot(1400, 1)
    memory.copy_slots([(1366, 1401), (683, 2)])
    for slot, pattern in ((1, 1400), (1401, 1366), (2, 683), (34, 34), (35, 35)):
        assert bool((memory.temporal[:, slot] == pattern).all()) and bool((memory.conv[:, slot] == -pattern).all())
    assert not memory.temporal[:, 0].any() and not memory.temporal[:, 33].any()


@pytest.mark.parametrize(
    ("strategy", "strict", "grid"), [("exact", False, 1), ("exact", True, 64), ("extra_buffer", False, 64)]
)
def test_s58_cold_against_warm(model, record_property, strategy, strict, grid):
    """Cold runs agree, warm runs agree; strict: cold = warm token for token; default: the differences are reported."""
    w = model(strategy, strict_reuse=strict, chunk=512)
    prompts = [X(0) * 300, X(1) * 410, X(2) * 700]

    def run() -> list[list[int]]:
        answers = [w.ask(prompt, 8) for prompt in prompts]
        reuses.append([answer.resume for answer in answers])
        return [answer.text for answer in answers]

    reuses: list[list[int]] = []
    colds = [run()]
    assert w.scheduler.flush()
    colds.append(run())
    run()
    warms = [run(), run()]
    most = [(len(prompt) - 1) // grid * grid for prompt in prompts]
    assert reuses[:2] == [[0, 0, 0]] * 2 and reuses[-2:] == [most] * 2
    assert colds[0] == colds[1] and warms[0] == warms[1]
    different = sum(a != b for a, b in zip(colds[0], warms[0], strict=True))
    record_property("texts that differ, cold against warm", f"{different} of {len(prompts)}")
    assert different == 0 or not strict


def test_s59_order_must_not_matter(model):
    """Strict reuse: whoever comes before, and whoever runs beside it, the text of A is the same to the token."""
    texts = set()
    for order in ("ABAD", "BADA", "DABA"):
        for crowded in (False, True):
            w = model(strict_reuse=True, chunk=256)
            if crowded:
                w.start(Y * 30, 200)
            for name in order:
                number = w.start(H * 300 + Stream(name, VOCABULARY) * 50, 8)
                while number not in w.ends:
                    w.tick()
                if name == "A":
                    texts.add(tuple(w.texts[number]))
            for running in w.scheduler.running():
                w.cancel(running.number)
    assert len(texts) == 1
