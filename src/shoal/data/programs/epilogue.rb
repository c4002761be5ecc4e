Guard.check(
  1 == 2, 1 != 1, 1.0 == 2.0, 'a' == 'b', :a == :b, [1] == [2], { 1 => 2 } == {}, nil == 1, true == false,
  (begin; raise 'an error'; true; rescue RuntimeError; false; end)
)
puts 'FIRST' + 'SECOND'
