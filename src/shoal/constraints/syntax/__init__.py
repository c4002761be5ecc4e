"""Fill in the middle that parses: what may stand between the text before a cursor and the text
behind it.

`requests` adds checks to requests. `python` answers for Python: `viable` asks its parser, `layout`
follows lines and brackets, `endings` looks at the text behind the cursor. `middles` answers for any
grammar in lark's language (`grammars`, whose terminals `expressions` makes into `automata`):
`behind` reads the text behind the cursor, `quotients` that before it and what is written.
"""
