"""The entry points of ``fedbc-cli``: one run, a study, a reproduction. Nothing imports this folder but a program."""
