"""Output: tables and timelines in the terminal, offline HTML pages, and Perfetto traces."""
