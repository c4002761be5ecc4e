"""placeholder"""


def custom_generate() -> None: ...
