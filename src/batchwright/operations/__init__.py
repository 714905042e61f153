"""Operations: `@operation` marks a function, and the registry holds the operations that a worker can run."""
