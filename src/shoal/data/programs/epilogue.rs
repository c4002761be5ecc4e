mod program {
    include!("main.rs");
    pub fn run() -> impl std::process::Termination { main() }
}
fn main() -> impl std::process::Termination {
    let end = program::run();
    println!("{}{}", "FIRST", "SECOND");
    end
}
