"""What a person does with checkpoints from the command line: one module for each command, and what they share.

Owns the commands' work. It stands apart from printing (`show`, `bar`) and from options and exit codes (`checkpoint.cli`). Nothing
here is needed to save or load.
"""
