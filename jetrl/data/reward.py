"""The reward: 1 for the right answer, 0 otherwise.

VeRL loads it by `reward.custom_reward_function.path=pkg://jetrl.data.reward`. Validation reports it as
`val-core/<data_source>/acc/mean@<n>`, because the result has a key `acc`.
"""

import re

# Tasks with whole-number answers; every other data source goes to VeRL's own grader for it.
INTEGER_SOURCES = ("arithmetic", "chain", "gsm_symbolic")
# Only the end of a response is searched: the answer is there, and a very long response stays cheap.
TAIL_CHARACTERS = 1000
MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\uff0d": "-"})
# A sign belongs to the number unless it follows a digit, a word or a bracket ("12-5" ends in 5). Groups of three digits
# may be separated by commas; a decimal part is matched so that "3.5" is not read as 5.
NUMBER = re.compile(r"(?<![\w.])(?:(?<![\w)\]}])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_) -> dict:
    """{"score": 0.0 or 1.0, "acc": the same} of one response.

    extra_info and further keywords are VeRL's to give and not used. A data source that neither jetrl nor VeRL grades
    raises VeRL's NotImplementedError.
    """
    if data_source in INTEGER_SOURCES:
        score = float(final_integer(solution_str) == _canonical(str(ground_truth)))
    else:
        from verl.utils.reward_score import default_compute_score

        result = default_compute_score(data_source, solution_str, ground_truth, extra_info)
        score = float(result["score"] if isinstance(result, dict) else result)
    return {"score": score, "acc": score}


def final_integer(text: str) -> str | None:
    """The whole number a response ends with, in canonical decimal form ("-7", "1234"); None when there is none.

    What follows the last "####", else the last \\boxed{}, else the whole text is searched for its last number; a number
    with a non-zero decimal part is no whole number. Text, not int: thousands of digits are legal text.
    """
    text = text[-TAIL_CHARACTERS:].translate(MINUS_SIGNS)
    boxes = BOXED.findall(text)
    if "####" in text:
        text = text.rpartition("####")[2]
    elif boxes:
        text = boxes[-1]
    numbers = NUMBER.findall(text)
    return _canonical(numbers[-1]) if numbers else None


def _canonical(number: str) -> str | None:
    whole, _, decimals = number.strip().replace(",", "").partition(".")
    if decimals.strip("0"):
        return None
    digits = whole.lstrip("-+").lstrip("0") or "0"
    return f"-{digits}" if whole.startswith("-") and digits != "0" else digits
