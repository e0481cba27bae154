"""The command line of one run: experiments from YAML files, checked before they start.

:class:`~fedbc_lightning.cli.federated.FederatedCLI` is Lightning's CLI with our sections. The modules that read the
words of a command line import neither torch nor Lightning.
"""
