"""Fill in the middle that parses: the texts that may stand between the two texts around a cursor.

`requests` adds checks to requests, and has them by name. `python` checks Python:
`viable` calls its parser, `layout` follows lines and brackets, `endings` looks at the text behind
the cursor. `middles` checks any grammar in lark's language (`grammars`, whose terminals are
`automata`): `behind` reads the text behind the cursor, and quotients the text before it and the new
text. `tree_middles` checks languages that tree-sitter reads, by the error nodes of the whole.
"""
