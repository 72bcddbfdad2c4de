"""Operations with a way of their own to run on blocks of the batch."""
