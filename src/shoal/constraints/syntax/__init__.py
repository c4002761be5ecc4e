"""Fill in the middle that parses: what may stand between the text before a cursor and the text behind it.

`python` answers for Python, `viable` asks its parser, `layout` follows lines and brackets.
"""
