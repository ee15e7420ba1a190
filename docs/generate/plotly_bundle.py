"""Makes src/weft/report/plotly.min.js: plotly.js with only the kinds of traces that weft draws.

The library in the Python package `plotly` has 4.8 MB, most of it maps and 3D. This keeps lines,
bars and heat maps, which is about 1 MB, so that a page can contain it and still be mailed.
    python docs/generate/plotly_bundle.py --esbuild PATH   (needs the package plotly and esbuild)

The library is one function in which esbuild wrapped each module as `var name = wrap(function)`.
Marked as free of side effects, the modules that nothing needs are removed by esbuild again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

KEPT = ("bar", "heatmap")
"""The kinds of traces beside "scatter", which is part of the core."""

OUT = Path(__file__).parents[2] / "src" / "weft" / "report" / "plotly.min.js"

NOTICE = """\
/**
* plotly.js v{version}, without the traces that weft does not draw (docs/generate/plotly_bundle.py)
* Copyright 2012-2026, Plotly, Inc.
* Licensed under the MIT license:
*
* Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
* associated documentation files (the "Software"), to deal in the Software without restriction,
* including without limitation the rights to use, copy, modify, merge, publish, distribute,
* sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
* furnished to do so, subject to the following conditions: The above copyright notice and this
* permission notice shall be included in all copies or substantial portions of the Software.
*
* THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
* NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
* NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
* DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT
* OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
*
* Contains d3 (copyright Michael Bostock, BSD-3-Clause), native-promise-only (copyright Kyle
* Simpson, MIT), polybooljs (copyright Sean Connelly, MIT) and object-assign (copyright Sindre
* Sorhus, MIT).
*/
"""


def modules_of(library: str) -> str:
    """The modules of the library at the top level, where esbuild removes those not needed."""
    body = _found(r"var Plotly=\(\(\)=>\{(.*)return ([\w$]+)\(\);\}\)\(\);\n", library)
    modules, entry = body.groups()
    wrap = _found(r"var ([\w$]+)=\(e,t\)=>\(\)=>\{try\{return t\|\|e\(\(t=\{exports", modules)[1]
    lazy = _found(r"var ([\w$]+)=\(e,t,r\)=>\(\)=>\{if\(r\)throw r\[0\]", modules)[1]
    names = _found(r"\b([\w$]+)=\(e,t\)=>\{for\(var r in t\)[\w$]+\(e,r,\{get:t\[r\]", modules)[1]

    registered = _found(r"\.register\(\[((?:[\w$]+\(\),?){20,})\]\)", modules)
    kept = [name for name in registered[1].split(",") if _kind(name, modules, wrap) in KEPT]
    assert len(kept) == len(KEPT), f"found {len(kept)} of the traces {KEPT}"
    modules = modules.replace(registered[0], f".register([{','.join(kept)}])")
    # The style sheet of maps is needed by the core, for traces on maps only.
    modules = modules.replace(_found(r'[\w$]+==="map"&&[\w$]+\(\),', modules)[0], "")

    pure = "/* @__PURE__ */"
    wrapped = rf"(?<=[,\s])([\w$]+)=({re.escape(wrap)}|{re.escape(lazy)})\((?=\(|[\w$]+=>)"
    modules = re.sub(wrapped, rf"\1={pure}\2(", modules)
    exports = rf"var ([\w$]+)=\{{\}};{re.escape(names)}\(\1,"
    modules = re.sub(exports, rf"var \1={pure}named(", modules)
    named = f"var named=t=>{{var e={{}};{names}(e,t);return e}};"
    return f'"use strict";{named}{modules}window.Plotly={entry}();'


def _kind(call: str, modules: str, wrap: str) -> str:
    """The kind of traces that `call` registers, which is the name in the module it passes on."""
    name = re.escape(call.removesuffix("()"))
    passed = rf'var {name}={re.escape(wrap)}\(\([^)]*\)=>\{{"use strict";[\w$]+\.exports=([\w$]+)\('
    module = _found(passed, modules)[1]
    start = modules.index(f"var {module}={wrap}(")
    return _found(r'name:"(\w+)"', modules[start:])[1]


def _found(pattern: str, text: str) -> re.Match[str]:
    match = re.search(pattern, text, re.DOTALL)
    assert match, f"this plotly.js is made differently: no {pattern}"
    return match


def main() -> None:
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--esbuild", default="esbuild", help="the program")
    options = ["--bundle", "--format=iife", "--minify", "--target=es2018", "--legal-comments=none"]
    command = [parser.parse_args().esbuild, *options]
    small = subprocess.run(
        command, input=modules_of(get_plotlyjs()), capture_output=True, text=True, check=True
    ).stdout
    notice = NOTICE.format(version=get_plotlyjs_version())
    OUT.write_text(notice + small.replace("</script", "<\\/script"), encoding="utf-8")
    print(f"{OUT.name}: {OUT.stat().st_size / 1e6:.2f} MB, from plotly {version('plotly')}")


if __name__ == "__main__":
    main()
