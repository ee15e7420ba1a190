"""Generators of documents, and their templates. They are not part of the installed package.

`weft bench NAME --write docs` writes the documents that `generate/NAME.py` makes of the benchmark's
result. `python docs/generate/reference.py` writes reference.md.
"""
