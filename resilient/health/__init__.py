"""Whether a node is fit to hold ranks.

Each check gives findings (`report`): a name, a verdict, a sentence and what was measured. What may hang, which is all that touches
a GPU, a file system or another process, runs in a process of its own with a time limit (`bounded`). `node` is what an agent has
checked before its node takes part; `doctor` is all of it, for a person.
"""
