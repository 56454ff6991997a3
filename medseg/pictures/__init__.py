"""Pictures that a person looks at."""
