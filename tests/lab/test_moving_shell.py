"""`lockstep init --from train.sh`: the words that a shell gives a program."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.run import RunError
from lockstep.lab.import_config import command_line, shell
from lockstep.lab.import_config.table import RunDraft

TRL = "python sft.py --model_name_or_path acme/chat --dataset_name acme/chats"

# A script, and the words of the command that starts with python.
WORDS: tuple[tuple[str, list[str]], ...] = (
    ("python a.py --x '<|im_end|>' \"a & b\" c\\;d # e", ["--x", "<|im_end|>", "a & b", "c;d"]),
    ("python a.py --name exp#1 --lr 2", ["--name", "exp#1", "--lr", "2"]),
    ("python a.py >log.txt --lr 2 2>&1 <in &>>all | tee log", ["--lr", "2"]),
    ("A=1; B=2\npython a.py $A ${B} '$A' \"$A $B\"", ["1", "2", "$A", "1 2"]),
    ("A=(--x 1 # no\n 'two words')\nA+=(--z)\npython a.py \"${A[@]}\"", ["--x", "1", "two words", "--z"]),
    ("A='--x 1'\nA+=' --y 2'\npython a.py $A", ["--x", "1", "--y", "2"]),
    ('E=()\npython a.py "${E[@]}" --x', ["--x"]),
    ("python a.py ${A:-3} ${B-'4'} ${C:=5} $C", ["3", "4", "5", "5"]),
    ("N=4\npython a.py $((N * 2)) $((${N}-1)) $((2**9)) $((N/3))", ["8", "3", "$((2**9))", "$((N/3))"]),
    ("A=1\nif test -f x; then\n  A=2\nfi\npython a.py $A ${A:-3}", ["$A", "${A:-3}"]),
    ("case $1 in\n  --lr) LR=1; shift ;;\n  *) LR=2 ;;\nesac\npython a.py $LR", ["$LR"]),
    ("main() {\n  LR=1\n  python a.py $LR\n}\nmain", ["1"]),
    ("A=1\nsource env.sh\nB=2\npython a.py $A $B", ["$A", "2"]),
    ("A=1\nsource venv/bin/activate\npython a.py $A", ["1"]),
    ("A=1\nunset A\npython a.py $A ${A:-2}", ["$A", "2"]),
    ("A=$(cat lr)\nB=`cat lr`\npython a.py $A $B", ["$A", "$B"]),
    ("A=1\nread A\npython a.py $A", ["$A"]),
    ("A=1\n(A=2)\npython a.py $A", ["$A"]),
    ("A=1\n((A++))\npython a.py $A", ["$A"]),
    ("declare -i A=1\nexport B=2 C='3 4'\nreadonly D=5\npython a.py $A $B \"$C\" $D", ["$A", "2", "3 4", "5"]),
    ("A=1\nA=2 echo\npython a.py $A", ["1"]),
    ("cat > c.sh <<EOF\nA=3\npython b.py\nEOF\npython a.py --x", ["--x"]),
    ("python a.py \\\n  --x 1 \\\r\n  --y", ["--x", "1", "--y"]),
    ("python a.py --x $'a b' $? \"$@\" <(cat x)", ["--x", "$'a b'", "$?", "$@", "$<(cat x)"]),
)


def test_words_are_those_that_a_shell_gives() -> None:
    for text, words in WORDS:
        lines = [each.words[2:] for each in shell.commands(text) if each.words[0] == "python"]
        assert lines == [words], text
    for text in ("echo '", 'echo "', "a=(", "echo $(", "`", "${", "<<", "case", "for", "\\", "((", ")", "fi"):
        shell.commands(text)  # a text without an end has one all the same
    assert [each.number for each in shell.commands("# a\n\nx \\\n y\n'a\nb'\nz")] == [3, 5, 7]


def draft(text: str) -> RunDraft:
    drafted = RunDraft()

    def fail(*_: Any) -> Any:
        raise AssertionError("no other file is read")

    command_line.read(Path("run.sh"), text, fail, fail)(drafted, 1)
    return drafted


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--gradient_accumulation_steps $((2 / 1))", "known only when"),
        ("--lora_target_modules q_proj $MORE", "known only when"),
        ('--packing false "$@"', "known only when"),
        ("--config c.yaml", "no file of settings that is here"),
        ("\\\n  # --bf16 \\\n  --num_train_epochs 2", "line 3: --num_train_epochs"),
    ],
)
def test_what_only_the_shell_knows_is_refused(words: str, why: str) -> None:
    assert why in "\n".join(map(str, draft(f"{TRL} {words}\n").gaps))


def test_programs_in_loops_and_after_others_are_refused() -> None:
    loop = draft(f"for i in 1 2; do\n  {TRL}\ndone\n")
    assert "a loop of the shell repeats it" in "\n".join(map(str, loop.gaps))
    for text in ("python a.py && python b.py", "python a.py; python b.py"):
        with pytest.raises(RunError, match="several programs"):
            draft(text)
    plain = draft(f"pip install trl; python -m pip install x\n{TRL} --learning_rate 1e-4 | tee log\n")
    assert not [each for each in plain.gaps if "columns" not in str(each)]
    assert plain.keys["optim.learning_rate"]


def test_values_of_options_stay_texts_unless_they_are_numbers_switches_or_json() -> None:
    values = {"summarize: ": "summarize: ", "a #b": "a #b", "010": "010", "2024-01-01": "2024-01-01", "- x": "- x"}
    values |= {"3": 3, "0.5": 0.5, "true": True, "no": False, '{"a": 1}': {"a": 1}, "~": "~"}
    words = " ".join(f"--o{i} '{each}'" for i, each in enumerate(values))
    (line,) = shell.commands(f"python a.py {words}")
    assert list(command_line._command(line.words, 1, False).options.values()) == list(values.values())
