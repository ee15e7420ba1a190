"""Generators of documents, with their templates; no part of the installed package.

`weft bench NAME --write docs` writes what `generate/NAME.py` makes of the benchmark's result, and
`python docs/generate/reference.py` writes reference.md.
"""
