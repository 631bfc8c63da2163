"""Reading settings out of a shell script without running it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import ConfigError
from tidemill.verl.script import read_settings
from tidemill.verl.word import Text, Unknown


def value(line: str, before: str = "", **environment: str) -> Text:
    """What `a.b=LINE` sets a.b to, behind some other lines."""
    return read_settings(f"{before}\npython -m verl.main a.b={line}\n", [], environment)["a.b"]


@pytest.mark.parametrize(
    ("before", "line", "expected"),
    [
        ("", "3", "3"),
        ("x=5", "$x", "5"),
        ("x=5", '"${x}0"', "50"),
        ("x=5", "'$x'", "$x"),
        ("x='a b' y=c", '"$x/$y"', "a b/c"),
        ("x=${x:-7}", "$x", "7"),
        ("x=2; x=${x:-7}", "$x", "2"),
        ("y=1; x=${x:-${y}/z}", "$x", "1/z"),
        ("", "${HOME}/m", "/home/me/m"),
        ("n=3", "$((1024 * (n + 1)))", "4096"),
        ("n=3", "$(((512*$n)))", "1536"),
        ("", "$((7 / 2 - 4))", "-1"),
        ("x=1 # x=2", "$x", "1"),
        ("export x=4", "$x", "4"),
        ("", "['console','tensorboard']", "[console,tensorboard]"),
        ("", "\"['console']\"", "['console']"),
        ("x=1\nif true; then echo; fi\nx=2", "$x", "2"),
        ("x=${x:-'a b'}", '"$x"', "a b"),
        ("x=${x:-~/m}", "$x", "/home/me/m"),
        ("x=~/m", "$x", "/home/me/m"),
        ("", '"~/m"', "~/m"),
        (": ${x:=5}", "$x", "5"),
        ("x=1; y=${x:?is needed}", "$y", "1"),
        ("x=a; x+=b", "$x", "ab"),
        ("", "$((${x:-2} * 3))", "6"),
        ("", "${1:-vllm}", "vllm"),
        ("", '"a\\nb\\$c"', "a\\nb$c"),
        ("cat > note <<'END'\nit isn't x=3\nEND\nx=4", "$x", "4"),
        ("x=1\ntrue &&\n  echo; x=2", "$x", "2"),
    ],
)
def test_values_are_what_the_shell_makes_of_them(before: str, line: str, expected: str, tmp_path: Path) -> None:
    assert value(line, before, HOME="/home/me") == expected
    shell = f"{before}\nprintf %s a.b={line}"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, check=True, env={"HOME": "/home/me"}, cwd=tmp_path
    )
    assert done.stdout.split("\n")[-1] == f"a.b={expected}"


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("", "$(nproc)"),
        ("", "`nproc`"),
        ("", "$unset"),
        ("", "${x:0:3}"),
        ("x=1\nif true; then\n  x=2\nfi", "$x"),
        ("for x in 1 2; do y=$x; done", "$y"),
        ("x=(1 2)", "$x"),
        ("", "$((n + 1))"),
        ("", "$((1 << 4))"),
        ("", "$?"),
        ("x=1\ntrue && x=2", "$x"),
        ("x=1\nfalse ||\n  x=2", "$x"),
        ("", "${x:?is needed}"),
        ("x=$(nproc); x+=1", "$x"),
    ],
)
def test_what_only_the_shell_could_tell_is_unknown(before: str, line: str) -> None:
    assert isinstance(value(line, before), Unknown)


def test_arguments_stand_last_and_take_settings_out() -> None:
    script = 'python -m verl.main a.b=1 +a.c=2 ++a.d=3 \\\n  a.b=4 "$@" > log 2>&1\n'
    assert read_settings(script, ["a.d=5", "~a.c"], {}) == {"a.b": "4", "a.d": "5"}


WHOLE = """
data=(
  data.a="$PWD"   # a comment
  "data.b=x y" \\
  'data.c=$z'
)
data+=(data.d=[1,2])
many="
  trainer.e=1
  trainer.f=2
"
none=
options=("${data[@]}" trainer.g=3)
half="${half:-$((8 / 2))}"
pair=("trainer.k=1 trainer.l=2")
say() { local who="$1"; echo "$who" >&2; }
say hello >/dev/null
cat <<END >/dev/null
python -m other a.b=5
END
folder="$PWD/fully_async_policy"
NAME=1 python3 -m verl.main --config-path="$folder/config" --config-name='fully_async_ppo_trainer.yaml'\\
   model_engine=dp "${options[@]}" $many $none \\
   \\
   `# a comment in the middle` \\
   trainer.j=${none:-"m n"} ${pair[@]} \\
   trainer.i=$half trainer.h="$none" "${@:2}" "$@" 2>&1 | tee log &
"""


def test_a_whole_command_has_the_words_that_the_shell_gives_it(tmp_path: Path) -> None:
    """Arrays, variables that are parted, options and what stands around the command."""
    shell = "python3() { printf '%s\\0' \"$@\"; }\n" + WHOLE + "\nwait"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True, cwd=tmp_path)
    words = done.stdout.split("\0")[4:-1]
    expected = dict(word.split("=", 1) for word in words)
    assert len(expected) == 13
    assert read_settings(WHOLE, [], {"PWD": str(tmp_path)}) == expected


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo hello", "0 commands"),
        ("python -m verl.main a.b=1\npython -m verl.main a.b=2", "2 commands"),
        ("python -m verl.main a.b=1 --flag", "--flag"),
        ("python -m verl.main a.b=1 ~a.c=3", "~a.c=3"),
        ("python -m verl.main a.b='1", "closing '"),
        ('python -m verl.main a.b="1', "closing quote"),
        ("python -m verl.main a.b=$((1", r"closing \)"),
        ("python -m verl.main --config-name=ppo_megatron_trainer a.b=1", "megatron"),
        ("python -m verl.main a.b=1 --config-name mine", "--config-name=mine"),
        ("python -m verl.main --config-path=/my a.b=1", "--config-path=/my"),
        ('python -m verl.main --config-path="$(pwd)/conf" a.b=1', "--config-path"),
        ("python -m verl.main a.b=1 stray", "'stray'"),
        ("python -m verl.main a.b=1 \\\n # off \\\n a.c=2", "2 commands.*A comment or an empty line"),
        ('x=(1)\nif true; then x+=(2); fi\npython -m verl.main a.b=1 "${x[@]}"', "x is set under a condition"),
        ('python -m verl.main a.b=1 "${x[@]}"', "x is no array"),
        ("x=(1\npython -m verl.main a.b=1", r"closing \)"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused_with_the_place(script: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(script, [], {})


@given(st.text(alphabet="ab1$\"'\\ \n#={}()`;|~+.<>", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        settings = read_settings(text, [], {})
    except ConfigError:
        return
    assert all("." in key for key in settings)
