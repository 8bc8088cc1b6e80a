"""Text of prompts and answers: incremental detokenization and stop strings, chat templates. Imports neither torch nor
transformers.
"""

from sidestream.text.detokenizer import Detokenizer, StopStrings, TokenizerLike, sample_tasks, sample_text

__all__ = ["Detokenizer", "StopStrings", "TokenizerLike", "sample_tasks", "sample_text"]
