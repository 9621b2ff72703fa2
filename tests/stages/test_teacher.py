"""A separate teacher file: what must fit, whose norm and head are used, and what each loss weight leaves out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cortiq_fcd.errors import ConfigError, CortiqError, TokenizerError
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.plan import plan_model
from cortiq_fcd.model.replica import Replica, loss_and_gradient, new_replica
from cortiq_fcd.stages import evaluate, pipeline
from cortiq_fcd.stages.config import PolishConfig, TrainConfig
from cortiq_fcd.stages.report import Report
from cortiq_fcd.stages.teacher import check_teacher
from tests.fixtures import LINEAR, Tiny, in_f64, tiny_text, tiny_tokenizer, write_arrays
from tests.oracles import cmf_reader, loss, transformer
from tests.oracles.compare import worst_error

STUDENT = Tiny(layers=2, seed=1)
OTHER_TOKENIZER = tiny_tokenizer().replace(b'"a":2', b'"A":2')


def config(folder: Path, teacher: Path | None, **train: Any) -> PolishConfig:
    train = {"steps": 4, "lr": 2e-3, "eval_every": 2, "seq": 40, "teacher": teacher, **train}
    return PolishConfig.model_validate(
        {
            "o1": {"m": 4, "w": 5, "sink": 2},
            "corpus": {"train": folder / "train.txt", "val": folder / "val.txt"},
            "train": train,
            "gate": {"enabled": False},
            "compute": {"threads": 1, "device": "cpu", "precision": "f32"},
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text(tiny_text(2000, seed=1), encoding="utf-8")
    (tmp_path / "val.txt").write_text(tiny_text(600, seed=2), encoding="utf-8")
    STUDENT.write(tmp_path / "in.cmf", tokenizer=tiny_tokenizer())
    return tmp_path


def polished(folder: Path, out: str, teacher: Path | None, **train: Any) -> Report:
    return pipeline.run(folder / "in.cmf", folder / out, config(folder, teacher, **train))


# What must fit

MISFITS = {
    "hidden size": (replace(STUDENT, C=20), tiny_tokenizer(), ConfigError, 2),
    "number of layers": (replace(STUDENT, layers=3), tiny_tokenizer(), ConfigError, 2),
    "vocabulary": (replace(STUDENT, V=31), tiny_tokenizer(), ConfigError, 2),
    "tokenizer": (STUDENT, OTHER_TOKENIZER, TokenizerError, 5),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_teacher_that_does_not_fit(folder: Path, what: str) -> None:
    model, tokenizer, kind, exit_code = MISFITS[what]
    teacher = model.write(folder / "teacher.cmf", tokenizer=tokenizer)
    before = set(folder.iterdir())
    with pytest.raises(kind, match=what) as caught:
        polished(folder, "out.cmf", teacher)
    assert caught.value.exit_code == exit_code
    assert "teacher.cmf" in caught.value.message
    assert caught.value.hint
    assert set(folder.iterdir()) == before


def test_padding_is_not_vocabulary(folder: Path) -> None:
    teacher = replace(STUDENT, padding=5, tied=False, seed=3).write(folder / "teacher.cmf", tokenizer=tiny_tokenizer())
    assert polished(folder, "out.cmf", teacher).warnings == []


@pytest.mark.parametrize("lacks", ["teacher", "student"])
def test_a_file_without_a_tokenizer_can_not_be_compared_and_that_is_said(folder: Path, lacks: str) -> None:
    files = {name: folder / f"{name}.cmf" for name in ("student", "teacher")}
    for name, path in files.items():
        STUDENT.write(path, tokenizer=None if name == lacks else tiny_tokenizer())
    with open_model(files["student"]) as student, open_model(files["teacher"]) as teacher:
        notes = check_teacher(teacher, plan_model(teacher), student, plan_model(student))
    assert len(notes) == 1
    assert str(files[lacks]) in notes[0]


def test_a_missing_teacher(folder: Path) -> None:
    with pytest.raises(CortiqError, match=r"teacher\.cmf") as caught:
        polished(folder, "out.cmf", folder / "teacher.cmf")
    assert caught.value.exit_code == 2


# Whose function it is


def test_the_teacher_is_the_file_and_the_student_is_not(folder: Path) -> None:
    """Its perplexity is its own; what is written is the student's, but for what was trained."""
    model = replace(STUDENT, F=20, tied=False, seed=7)
    teacher = model.write(folder / "teacher.cmf", tokenizer=tiny_tokenizer())
    model.write(folder / "in2.cmf", tokenizer=tiny_tokenizer())
    with_teacher = polished(folder, "out.cmf", teacher, kl=0.1)
    alone = pipeline.run(folder / "in2.cmf", folder / "out2.cmf", config(folder, None))
    assert with_teacher.ppl.teacher == pytest.approx(alone.ppl.teacher, rel=1e-6)
    assert with_teacher.recipe.teacher == str(teacher)
    source, written = (cmf_reader.read(folder / name)[1] for name in ("in.cmf", "out.cmf"))
    assert with_teacher.best_step > 0
    assert source.keys() == written.keys()
    same = {name for name, value in source.items() if np.array_equal(value, written[name])}
    assert same == {name for name in source if "self_attn" in name or "layers" not in name}


def test_the_file_as_its_own_teacher_is_the_default(folder: Path) -> None:
    """A teacher file with the same bytes gives the same numbers, by a longer way."""
    own = polished(folder, "out.cmf", None, polish_only=True)
    given = polished(
        folder, "out2.cmf", STUDENT.write(folder / "same.cmf", tokenizer=tiny_tokenizer()), polish_only=True
    )
    for a, b in zip(own.losses, given.losses, strict=True):
        assert (a.ce, a.kl, a.grad_norm) == pytest.approx((b.ce, b.kl, b.grad_norm), rel=1e-4, abs=1e-7)
    assert own.ppl.teacher == given.ppl.teacher


# The two weights of the loss

O1 = Conversion((0, 1, 2), "all", m=6, w=5, sink=2, seal=20)
KINDS: dict[str, tuple[Tiny, Tiny, Conversion]] = {
    "own norm and head": (Tiny(seed=10), Tiny(tied=False, F=17, seed=11), O1),
    "capped and multiplied": (
        Tiny(arch={"final_logit_softcapping": 3.0, "logit_multiplier": 0.6}, seed=12),
        Tiny(arch={"final_logit_softcapping": 9.0, "embed_multiplier": 2.0, "attn_logit_softcapping": 2.0}, seed=13),
        O1,
    ),
    "capped teacher alone": (Tiny(seed=14), Tiny(arch={"final_logit_softcapping": 2.0}, padding=3, seed=15), O1),
    "a hybrid taught by a looped gated model": (
        Tiny(arch={**LINEAR, "layer_types": ["LinearAttention", "FullAttention", "LinearAttention"]}, seed=16),
        Tiny(H=2, G=1, D=6, gate="head", arch={"num_loops": 2, "norm_style": "gemma"}, seed=17),
        replace(O1, layers=(0, 1), spec=(0, 1), polish_only=True),
    ),
}


def built(name: str) -> tuple[Replica, Tensor, Tensor]:
    """The network in f64 with masters a step from the frozen weights; ids and targets."""
    student, teacher, setting = KINDS[name]
    network = new_replica(in_f64(student.weights()), setting, in_f64(teacher.weights()))
    flat = network.masters.flat
    flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(1), dtype=flat.dtype), alpha=0.02)
    rows = torch.from_numpy(np.random.default_rng(4).integers(0, student.V, (2, 42)))
    return network, rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def doubles(model: Tiny) -> dict[str, Tensor]:
    return {key: torch.from_numpy(array).double() for key, array in model.arrays().items()}


def oracle_options(model: Tiny, setting: Conversion) -> transformer.Options:
    """From the header itself, not from the plan under test."""
    return transformer.Options(
        model.header()["arch"], setting.converted, m=setting.m, w=setting.w, sink=setting.sink, seal=setting.seal
    )


@pytest.mark.parametrize("kl_weight", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_autograd(name: str, kl_weight: float) -> None:
    network, ids, targets = built(name)
    found = loss_and_gradient(network, ids, targets, kl_weight)
    student, teacher, setting = KINDS[name]
    tensors, theirs = doubles(student), doubles(teacher)
    ours, other = oracle_options(student, setting), oracle_options(teacher, setting)
    leaves = {key: t.detach().clone().requires_grad_() for key, t in network.masters.named.items()}
    rows = transformer.hidden({**tensors, **leaves}, ours, ids, student=True)
    taught = transformer.hidden(theirs, other, ids, student=False)
    caps = (ours.arch.get("final_logit_softcapping"), other.arch.get("final_logit_softcapping"))
    ce = loss.ce(rows, ours.head(tensors), targets.flatten(), caps[0]).mean()
    kl = loss.kl(rows, taught, ours.head(tensors), other.head(theirs), *caps).mean()
    # At the ends the other half is left out altogether, not weighted by nothing.
    (ce if kl_weight == 0 else kl if kl_weight == 1 else (1 - kl_weight) * ce + kl_weight * kl).backward()
    assert (found.ce, found.kl) == pytest.approx((ce.item(), kl.item()), rel=1e-9)
    for key, leaf in leaves.items():
        assert leaf.grad is not None
        assert worst_error(network.gradient.named[key], leaf.grad) < 1e-8, key


@pytest.mark.parametrize("name", [name for name, (_, _, setting) in KINDS.items() if setting.converted])
def test_served_figures_are_those_of_the_oracle(name: str) -> None:
    """Perplexity and KL behind the seal: the student through the streaming kernel, the teacher with its own head."""
    network, _, _ = built(name)
    student, teacher, setting = KINDS[name]
    train = TrainConfig(seq=41, batch=2)
    where = evaluate.select_windows(train, np.random.default_rng(5).integers(0, student.V, 700), (), 0)
    found = {kind: evaluate.run(train, network, where, student=kind) for kind in (True, False)}
    rows = torch.from_numpy(np.stack([where.val[o : o + 42] for o in where.final]))
    options, other = oracle_options(student, setting), oracle_options(teacher, setting)
    tensors, theirs = doubles(student), doubles(teacher)

    def behind(hidden: Tensor) -> Tensor:
        return hidden.unflatten(0, (len(rows), 41))[:, setting.seal :].flatten(0, 1)

    ours = behind(transformer.hidden({**tensors, **network.masters.named}, options, rows[:, :-1], student=True))
    taught = behind(transformer.hidden(theirs, other, rows[:, :-1], student=False))
    targets = rows[:, 1 + setting.seal :].flatten()
    assert found[True].served == pytest.approx(options.loss(ours, tensors, targets).mean().exp().item(), rel=1e-8)
    assert found[False].served == pytest.approx(other.loss(taught, theirs, targets).mean().exp().item(), rel=1e-8)
    caps = (options.arch.get("final_logit_softcapping"), other.arch.get("final_logit_softcapping"))
    kl = loss.kl(ours, taught, options.head(tensors), other.head(theirs), *caps).mean()
    assert found[True].kl_served == pytest.approx(kl.item(), rel=1e-8)


def test_kl_0_does_not_see_the_teacher_and_kl_1_does_not_see_the_targets() -> None:
    network, ids, targets = built("own norm and head")
    loss_and_gradient(network, ids, targets, 0.0)
    first = network.gradient.flat.clone()
    network.teacher.head.mul_(3.0)
    loss_and_gradient(network, ids, targets, 0.0)
    assert torch.equal(network.gradient.flat, first)

    loss_and_gradient(network, ids, targets, 1.0)
    first = network.gradient.flat.clone()
    found = loss_and_gradient(network, ids, targets.flip(1), 1.0)
    assert torch.equal(network.gradient.flat, first)
    assert found.ce > 0
    loss_and_gradient(network, ids, targets.flip(1), 0.999)
    assert not torch.equal(network.gradient.flat, first)


def test_kl_0_writes_the_same_whoever_teaches(folder: Path) -> None:
    outs = []
    for seed in (8, 9):
        arrays = replace(STUDENT, seed=seed).arrays()
        teacher = write_arrays(folder / f"t{seed}.cmf", STUDENT.header(), arrays, tokenizer=tiny_tokenizer())
        report = polished(folder, f"out{seed}.cmf", teacher, kl=0.0)
        assert all(step.kl > 0 for step in report.losses)
        outs.append(cmf_reader.read(folder / f"out{seed}.cmf")[1])
    assert all(np.array_equal(value, outs[1][name]) for name, value in outs[0].items())
