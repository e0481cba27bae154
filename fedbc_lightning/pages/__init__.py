"""One self-contained HTML page about a study or a run, made from the files that it left."""
