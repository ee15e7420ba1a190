"""What was seen, shown: terminal tables and timelines, offline HTML pages, Perfetto traces."""
