"""What a program imports: read ahead of its execution, and told apart where it has modules of names that are ours."""
