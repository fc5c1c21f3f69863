"""How the bundled model `mini` is made: sprites, scenes, tokenizer, transformer, export."""
