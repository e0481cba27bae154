"""The entry points of ``fedbc-cli``: one run, a study, a reproduction. Only the program itself imports this folder."""
