"""Operations: `@operation` marks a function, the registry holds what a worker can run."""
