"""Fill in the middle that parses: what may stand between the text before a cursor and the text behind it.

`python` answers for Python, `layout` follows its lines and brackets, `token_text` gives the bytes of tokens.
"""
