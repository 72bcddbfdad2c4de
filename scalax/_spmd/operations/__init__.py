"""Operations with their own way to run on local shards."""
