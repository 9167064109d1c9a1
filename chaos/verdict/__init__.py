"""What came of an experiment: gathered, judged, shown."""
