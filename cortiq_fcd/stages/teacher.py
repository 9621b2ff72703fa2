"""Whether a separate teacher file can teach a student: same sizes, same vocabulary, same tokenizer."""

from __future__ import annotations

from cortiq_fcd.errors import ConfigError, TokenizerError
from cortiq_fcd.io.planned import AnyModel
from cortiq_fcd.io.reader import CmfModel
from cortiq_fcd.model.plan import ModelPlan


def check_teacher(
    teacher: CmfModel,
    teacher_plan: ModelPlan,
    student: AnyModel,
    student_plan: ModelPlan,
    *,
    option: str = "--teacher",
    hint: str = "a teacher is the same model in a better form, such as the file before compression",
) -> list[str]:
    """Notes for the user. Raises ConfigError for another size, TokenizerError for another tokenizer. `option`: what the
    file was given as.
    """
    sizes = (
        ("hidden size", teacher_plan.hidden_size, student_plan.hidden_size),
        ("number of layers", len(teacher_plan.layers), len(student_plan.layers)),
        ("vocabulary", teacher_plan.vocab_size, student_plan.vocab_size),
    )
    for name, theirs, ours in sizes:
        if theirs != ours:
            raise ConfigError(
                f"{option} {teacher.path}: its {name} is {theirs}, expected {ours} as in {student.path}",
                hint=hint,
            )
    their_vocab, our_vocab = teacher.section("vocab"), student.section("vocab")
    if their_vocab is None or our_vocab is None:
        missing = teacher.path if their_vocab is None else student.path
        return [f"{missing} has no tokenizer, so that the two files can't be compared in it"]
    if their_vocab != our_vocab:
        raise TokenizerError(
            f"{option} {teacher.path}: not the tokenizer of {student.path}: the same ids would mean other text",
            hint="use a file that was converted with the same tokenizer.json",
        )
    return []
