"""`make test-changed` runs the tests nearest to what git says has changed."""

from __future__ import annotations

import pytest

from scripts.changed_tests import nearest_tests

TEXTS = {
    "shop/till.py": "TAXES = 'taxes.json'\n",
    "shop/counter.py": "from shop import till\n",
    "shop/door.py": "def open():\n    from shop.counter import (\n        ring,\n        greet,\n    )\n",
    "shop/sign.py": "",
    "shop/web.py": 'PAGE = "window"\n',
    "tests/test_door.py": "import shop.door\n",
    "tests/test_counter.py": "from shop.counter import ring\n",
    "tests/test_web.py": "from shop.web import PAGE\n",
    "tests/test_line.py": 'run("sign")\n',
}


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("shop/door.py", ["door"]),
        ("shop/counter.py", ["counter"]),  # test_door is one import farther away
        ("shop/till.py", ["counter"]),  # no test imports it
        ("shop/sign.py", ["line"]),  # no module does either
        ("shop/taxes.json", ["counter"]),
        ("shop/window/light.js", ["web"]),
        ("tests/test_web.py", ["web"]),
        ("elsewhere/web.py", ["web"]),  # named after it, though the module is new
        ("docs/web.md", ["web"]),
        ("README.md", []),
    ],
)
def test_the_nearest_tests_of_a_file(file: str, tests: list[str]) -> None:
    assert nearest_tests(TEXTS, [file]) == [f"tests/test_{name}.py" for name in tests]


def test_of_the_tests_that_import_a_module_those_of_its_room_count_alone() -> None:
    texts = {f"tests/{folder}/test_{folder}.py": "from shop import door\n" for folder in ("shop", "street")}
    assert nearest_tests({"shop/door.py": "", **texts}, ["shop/door.py"]) == ["tests/shop/test_shop.py"]
