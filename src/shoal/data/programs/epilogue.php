if (ini_get('zend.assertions') . @ini_get('assert.active') . @ini_get('assert.exception') !== '111') {
    fwrite(STDERR, 'the completion turned assertions off'); exit(1);
}
echo 'FIRST' . 'SECOND';
