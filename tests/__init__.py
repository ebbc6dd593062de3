"""
Tests of trl_paddingfree. `runs.py` is the one way to build a run, with padding or without.

Bugs of padding-free training elsewhere stand in the docstrings of the tests that would show them here, such as
`trl#4170`. Those that cannot occur here, and why:

| bug | why not |
|---|---|
| trl#4632 packing drops truncated tokens | packing is TRL's; what it gives is cut back into its documents |
| trl#3526, #1230, #3067 "wrapped" packing mixes documents | asked for, and TRL's own meaning of the word |
| trl#5279, #5286 images and `keep_end` | refused in TRL's words, see trainers/test_vision.py |
| trl#5923 a GPU test that never ran | all but the kernels themselves is tested on the CPU |
| trl#5316, #3549 requests: SDPA and eager, shared prefixes | this package |
| transformers#26548 Python ints in a batch | a batch holds tensors and one object that moves itself |
| flash-attention#2562, #2568 zero-length queries in FA4 | no segment is empty, see model/test_what_models_are_told.py |
| ms-swift#4942 `predict_with_generate` | not offered; generation is untouched, see the same file |

Lists, floats and separators in flat rows (transformers#31629, #42502, #42620, #41652, #33946), and boundaries of
rejected rows that are offset by the padding of chosen ones (open-instruct#1900), show in all comparisons with padded
TRL; labels that packing mixes up (trl#5076, #3749) in the example of `LanguageModelingCollator`.

Sequence parallelism (ms-swift#6825, #5164) and GSPO (ms-swift#6548) have tests of their own, as all masks and positions
that the start-up check is to catch (transformers#46634, #39814, #47525, #46093, #35861, NeMo-RL#2105).
"""
