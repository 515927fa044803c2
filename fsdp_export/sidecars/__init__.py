"""Everything of a Hugging Face folder that is not weights: config, tokenizer, code."""
