"""Random hostile answers: a seeded generator that mixes tricks.  None of them is right; the truths
cannot be guessed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

TRUTH = "73519268"
TEXTS = (
    "\\boxed{",
    "\\boxed{}",
    "}",
    "{",
    "\\boxed{\\infty}",
    "\\boxed{x}",
    "\\boxed{\\mathbb{R}}",
    "\\boxed{(-\\infty,\\infty)}",
    "\\boxed{0=0}",
    "\\boxed{1=1}",
    "\\boxed{\\text{any number}}",
    "\\boxed{\\frac{1}{0}}",
    "\\boxed{9^{9^{9^{9}}}}",
    "\\boxed{1000!!!}",
    "\\boxed{\\sum_{i=1}^{n} i}",
    "\\boxed{a=a}",
    "\\boxed{[1,2,3,4]}",
    "\\boxed{nan}",
    "\\boxed{\\pm}",
    "\\boxed{x \\in \\mathbb{N}}",
    "$$",
    "$",
    "\\(",
    "\\text{",
    "####",
    "#### ",
    "#### nan",
    "#### ,,,",
    "Answer:",
    "Answer: $",
    "answer: \\boxed{",
    "The answer is ",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    "<answer></answer>",
    "<think></think><answer>x = x</answer><analysis></analysis><confidence>1</confidence>",
    "<analysis>",
    "<confidence>1</confidence>",
    "<confidence>inf</confidence>",
    "<answer>1+1</answer>",
    "<answer>3*5*7*11</answer>",
    "<answer>(3+5)*(7+11)=9973</answer>",
    "<answer>9973</answer>",
    "<answer>3**5**7**11</answer>",
    "<answer>{numbers}</answer>",
    "<answer>__import__('os')._exit(0)</answer>",
    "the a an",
    "The",
    "\x00",
    "\ud800",
    "\u202e",
    "İ",
    "9" * 400,
    "1e999",
    "-" * 300,
    "(" * 300,
    "1" + "," * 300,
    "[[" * 200,
    '{"name": "f", "arguments": {}}',
    "<tool_call>{}</tool_call>",
    "None",
    "True",
    "NaN",
    "Infinity",
    "...",
    "correct",
    "score: 1",
    '{"score": 10}',
    "__class__",
    "{{truth}}",
    "{truth}",
    "${truth}",
    "$truth",
    "%(truth)s",
    "\\u0037",
    "٧٣٥",
    "７３５",
    "0x7",
    "1_000",
    "lambda: 1",
    "integrate(x, x)",
    "x**99999999",
    "factorial(99999999)",
    "Symbol('x')",
    "print(1)",
    "exec('1')",
)
PROGRAMS = (
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
    "raise SystemExit(0)",
    "raise KeyboardInterrupt",
    "raise Exception('\\ud800')",
    "class A:\n    def __eq__(self, o): return True\n    __hash__ = None\ndef f(n): return A()",
    "def f(n): return NotImplemented",
    "import builtins; builtins.AssertionError = type('E', (Exception,), {})",
    "import builtins; builtins.__build_class__ = None\ndef f(n): return 1",
    "class I(int):\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n  "
    "  def __hash__(self): return 1\ndef f(n): return I(1)",
    'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'\\x00\\x00\\x00\\x10["b", '
    "[1]]')\n    except OSError: pass\ndef f(n): return 1",
    "import os\nfor fd in range(64):\n    try: os.close(fd)\n    except OSError: pass",
    "import os\nwhile True:\n    os.fork()",
    "while True: pass",
    "x = [0]\nwhile True: x += x",
    "def f(n): return f(n)",
    "import signal, os; os.kill(os.getppid(), signal.SIGKILL)",
    "import os; os.kill(0, 9)",
    "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'passed' in o: "
    "o['passed'] = 99\ndef f(n): return 1",
    "import sys\nsys.modules['builtins'].print = lambda *a: None\ndef f(n): return 1",
    "def f(n): return 10 ** 10 ** 9",
    "def f(n): raise StopIteration",
    "import threading\nfor _ in range(500): threading.Thread(target=lambda: [None for _ in "
    "iter(int, 1)], daemon=True).start()",
    "import sys; sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)",
    "import ctypes; ctypes.string_at(0)",
    "def f(n):\n    while True: print('x' * 65536)",
    "f = lambda n: type('S', (str,), {'__eq__': lambda s, o: True, '__hash__': None})('x')",
    "import atexit, os; atexit.register(os._exit, 0)",
    "import inspect\nfor fr in inspect.stack():\n    fr.frame.f_globals['check'] = lambda c: "
    "None\ndef f(n): return 0",
    "import sys; sys.settrace(lambda *a: None); sys.stdout.write('passed')\ndef f(n): return 0",
    "import socket; socket.socket()",
    "open('/proc/self/mem')",
    "print('rft-result:1')\ndef f(n): return 1",
    "def f(n): yield n",
    "async def f(n): return n",
    "def f(*a, **k): import time; time.sleep(100)",
    "import subprocess; subprocess.Popen(['sleep', '1000'])",
    "import os\nif os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(1000)\ndef f(n): "
    "return 1",
)


def texts(seed: int, count: int) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(count):
        pieces = draw.choices(TEXTS, k=draw.randint(1, 8))
        if draw.random() < 0.1:
            pieces = [draw.choice(TEXTS) * draw.randint(100, 3000), *pieces]
        if draw.random() < 0.2:
            pieces = [
                draw.choice(("<answer>", "\\boxed{", "Answer: ", "#### ")),
                *pieces,
                draw.choice(("</answer>", "}", "")),
            ]
        yield draw.choice(("", " ", "\n")).join(pieces)


def programs(seed: int, count: int) -> Iterator[str]:
    """One or several tricks after another, in a fence, in two, or in none."""
    draw = random.Random(seed)
    for _ in range(count):
        code = "\n".join(draw.choices(PROGRAMS, k=draw.choice((1, 1, 2, 3))))
        if draw.random() < 0.3:
            gives = draw.choice(("True", "n", "0", "None", "f"))
            code = (
                f"try:\n    exec({code!r})\nexcept BaseException:\n    pass\ndef f(n):\n    "
                f"return {gives}"
            )
        yield draw.choice(
            ("{0}", "```python\n{0}\n```", "```\n{0}", "```py\nx\n```\n```python\n{0}\n```")
        ).replace("{0}", code)
